// The end of a program while threads of it are still in C++: it ends with its own exit code.
#pragma once

namespace farcall {

// For the thread that ends the program, when that has begun. From now on a thread that dies waits
// for the end of the process instead: when Python has ended, a daemon thread that comes back from
// C++ is unwound by `pthread_exit`, and the first `noexcept` function on its stack, a destructor of
// torch's bindings most often, would call `std::terminate`, and that `abort`. What the calling
// thread itself does wrong still aborts.
void park_dying_threads();

// For the same thread: the process ends as soon as C's `exit` is called, with its status, without
// the destructors of static objects. Threads that still compute may be using those.
void skip_static_destructors();

}  // namespace farcall
