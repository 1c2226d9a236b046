// The fate of connections in processes that are forked from this one, by Python or by C.
#pragma once

#include <cstdint>

namespace farcall {

// Closes the connection in every child that is forked from now on, before `fork` returns there: a
// copy would keep it open when this process dies, and no peer would notice the death. The child's
// descriptor leads nowhere then, and is the child's to close.
//
// `fd` is a socket: a connection or a listener. It need not be taken back: once the number is
// another socket's, or none, it is left alone. Any thread.
void close_in_forked_children(int fd);

// The number of forks between the process that has loaded this code and the calling one.
std::uint32_t fork_generation();

}  // namespace farcall
