// Locks and roles of a link that a thread must hold, written so that Clang checks it (-Wthread-safety).
// docs/native.md teaches how to read and write it. For other compilers the macros are empty, and
// nothing here leaves a trace in the code.
#pragma once

#include <mutex>

#if defined(__clang__)
#define THREAD_SAFETY(attribute) __attribute__((attribute))
#else
#define THREAD_SAFETY(attribute)
#endif

// The names are those of Clang's manual, "Thread Safety Analysis".
#define CAPABILITY(kind) THREAD_SAFETY(capability(kind))
#define SCOPED_CAPABILITY THREAD_SAFETY(scoped_lockable)
#define GUARDED_BY(capability) THREAD_SAFETY(guarded_by(capability))
#define REQUIRES(...) THREAD_SAFETY(requires_capability(__VA_ARGS__))
#define EXCLUDES(...) THREAD_SAFETY(locks_excluded(__VA_ARGS__))
#define ACQUIRE(...) THREAD_SAFETY(acquire_capability(__VA_ARGS__))
#define RELEASE(...) THREAD_SAFETY(release_capability(__VA_ARGS__))
#define TRY_ACQUIRE(...) THREAD_SAFETY(try_acquire_capability(__VA_ARGS__))
#define ASSERT_CAPABILITY(capability) THREAD_SAFETY(assert_capability(capability))

namespace farcall {

class CAPABILITY("mutex") Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;

  void lock() ACQUIRE() { mutex_.lock(); }
  bool try_lock() TRY_ACQUIRE(true) { return mutex_.try_lock(); }
  void unlock() RELEASE() { mutex_.unlock(); }
  // As `RoleToken::assume`. Also where there is no other thread.
  void assume() const ASSERT_CAPABILITY(this) {}

 private:
  std::mutex mutex_;
};

// Holds a mutex to the end of a block.
class SCOPED_CAPABILITY MutexLock {
 public:
  enum class Taken { kBefore };

  explicit MutexLock(Mutex& mutex) ACQUIRE(mutex) : mutex_(mutex) { mutex.lock(); }
  // This thread has it, from `try_lock`.
  MutexLock(Mutex& mutex, Taken) REQUIRES(mutex) : mutex_(mutex) {}
  ~MutexLock() RELEASE() { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

// A role, as the compiler sees it: it has neither state nor code. Which thread has the role at run time
// is decided elsewhere, by the functions that say `begin` and `end` where it changes hands.
class CAPABILITY("role") RoleToken {
 public:
  // This thread has the role from here on, and has it no more.
  void begin() const ACQUIRE() {}
  void end() const RELEASE() {}
  // For the body of a lambda that is called where the role is held: the compiler looks at the body by
  // itself.
  void assume() const ASSERT_CAPABILITY(this) {}
};

// This thread has a role to the end of a block.
class SCOPED_CAPABILITY InRole {
 public:
  explicit InRole(const RoleToken& role) ACQUIRE(role) { role.begin(); }
  ~InRole() RELEASE() {}
  InRole(const InRole&) = delete;
};

// The role of the thread that is inside `next` or `poll` of an endpoint. One token stands for the
// threads of all endpoints.
inline constexpr RoleToken endpoint_thread{};

}  // namespace farcall
