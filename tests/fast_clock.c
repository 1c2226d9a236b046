// Lets time pass FAST_CLOCK times as fast in the programs that load this library (LD_PRELOAD): to them,
// the machine is slower by that factor. By it `make test-slow` shows which tests have a limit of time
// that decides on such a machine.
//
// The numbers that a program reads from a monotonic clock are multiplied; a timeout, or a deadline on such
// a clock, that the program hands to the C library is divided. The wall clock stays right, since files
// have its times and other programs read it; of the time up to a deadline on it, a share is left.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const int64_t kSecond = 1000000000;  // in nanoseconds, as all numbers here
static int64_t factor = 1;

#define REAL(name) ((__typeof__(&name))real_##name)
#define DECLARE(name) static void* real_##name;
#define FIND(name) real_##name = dlsym(RTLD_NEXT, #name);
// clang-format off
#define FOR_EACH(DO)                                                                             \
  DO(clock_gettime) DO(clock_nanosleep) DO(epoll_wait) DO(nanosleep) DO(poll) DO(ppoll)          \
  DO(pselect) DO(pthread_cond_clockwait) DO(select) DO(sem_clockwait) DO(sem_timedwait)          \
  DO(setitimer) DO(syscall)
// clang-format on

FOR_EACH(DECLARE)
static void* real_pthread_cond_timedwait;

__attribute__((constructor)) static void begin(void) {
  const char* text = getenv("FAST_CLOCK");
  if (text != NULL && atol(text) > 0) factor = atol(text);
  // dlsym gives the oldest of several versions.
  real_pthread_cond_timedwait = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
  FOR_EACH(FIND)
}

// Other libraries may call before their turn to begin comes.
static void be_ready(void) {
  if (real_clock_gettime == NULL) begin();
}

static int is_fast(clockid_t clock) {
  return clock == CLOCK_MONOTONIC || clock == CLOCK_MONOTONIC_RAW || clock == CLOCK_BOOTTIME ||
         clock == CLOCK_MONOTONIC_COARSE;
}

static int64_t number_of(const struct timespec* t) { return t->tv_sec * kSecond + t->tv_nsec; }

static struct timespec time_of(int64_t number) {
  return (struct timespec){number / kSecond, number % kSecond};
}

static struct timespec divided(const struct timespec* t) { return time_of(number_of(t) / factor); }

static int64_t wall_clock(void) {
  struct timespec now;
  REAL(clock_gettime)(CLOCK_REALTIME, &now);
  return number_of(&now);
}

static struct timespec sooner(const struct timespec* deadline) {
  const int64_t now = wall_clock(), left = number_of(deadline) - now;
  return left > 0 ? time_of(now + left / factor) : *deadline;
}

static struct timespec on(clockid_t clock, const struct timespec* deadline) {
  return is_fast(clock) ? divided(deadline) : sooner(deadline);
}

static int milliseconds(int timeout) {
  return timeout <= 0 ? timeout : (int)((timeout + factor - 1) / factor);
}

static struct timeval divided_value(const struct timeval* t) {
  const int64_t micro = (t->tv_sec * 1000000 + t->tv_usec + factor - 1) / factor;
  return (struct timeval){micro / 1000000, micro % 1000000};
}

int clock_gettime(clockid_t clock, struct timespec* t) {
  be_ready();
  const int result = REAL(clock_gettime)(clock, t);
  if (result == 0 && is_fast(clock)) *t = time_of(number_of(t) * factor);
  return result;
}

int sem_clockwait(sem_t* semaphore, clockid_t clock, const struct timespec* deadline) {
  be_ready();
  const struct timespec t = on(clock, deadline);
  return REAL(sem_clockwait)(semaphore, clock, &t);
}

int sem_timedwait(sem_t* semaphore, const struct timespec* deadline) {
  be_ready();
  const struct timespec t = sooner(deadline);
  return REAL(sem_timedwait)(semaphore, &t);
}

int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const struct timespec* deadline) {
  be_ready();
  const struct timespec t = on(clock, deadline);
  return REAL(pthread_cond_clockwait)(condition, mutex, clock, &t);
}

int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex,
                           const struct timespec* deadline) {
  be_ready();
  // A condition does not tell its clock. Only a deadline on the wall clock is in this century.
  const int is_wall = number_of(deadline) > wall_clock() / 2;
  const struct timespec t = on(is_wall ? CLOCK_REALTIME : CLOCK_MONOTONIC, deadline);
  return REAL(pthread_cond_timedwait)(condition, mutex, &t);
}

int poll(struct pollfd* fds, nfds_t count, int timeout) {
  be_ready();
  return REAL(poll)(fds, count, milliseconds(timeout));
}

int __poll_chk(struct pollfd* fds, nfds_t count, int timeout, size_t size) {
  (void)size;
  return poll(fds, count, timeout);
}

int ppoll(struct pollfd* fds, nfds_t count, const struct timespec* timeout, const sigset_t* mask) {
  be_ready();
  struct timespec t;
  if (timeout != NULL) t = divided(timeout);
  return REAL(ppoll)(fds, count, timeout != NULL ? &t : NULL, mask);
}

int __ppoll_chk(struct pollfd* fds, nfds_t count, const struct timespec* timeout, const sigset_t* mask,
                size_t size) {
  (void)size;
  return ppoll(fds, count, timeout, mask);
}

int epoll_wait(int fd, struct epoll_event* events, int count, int timeout) {
  be_ready();
  return REAL(epoll_wait)(fd, events, count, milliseconds(timeout));
}

int select(int count, fd_set* reads, fd_set* writes, fd_set* errors, struct timeval* timeout) {
  be_ready();
  struct timeval t;
  if (timeout != NULL) t = divided_value(timeout);
  return REAL(select)(count, reads, writes, errors, timeout != NULL ? &t : NULL);
}

int pselect(int count, fd_set* reads, fd_set* writes, fd_set* errors, const struct timespec* timeout,
            const sigset_t* mask) {
  be_ready();
  struct timespec t;
  if (timeout != NULL) t = divided(timeout);
  return REAL(pselect)(count, reads, writes, errors, timeout != NULL ? &t : NULL, mask);
}

int nanosleep(const struct timespec* asked, struct timespec* left) {
  be_ready();
  const struct timespec t = divided(asked);
  const int result = REAL(nanosleep)(&t, left);
  if (result != 0 && left != NULL) *left = time_of(number_of(left) * factor);
  return result;
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec* asked, struct timespec* left) {
  be_ready();
  const struct timespec t = (flags & TIMER_ABSTIME) != 0 ? on(clock, asked) : divided(asked);
  const int result = REAL(clock_nanosleep)(clock, flags, &t, left);
  if (result != 0 && left != NULL) *left = time_of(number_of(left) * factor);
  return result;
}

int usleep(useconds_t microseconds) {
  const struct timespec t = time_of((int64_t)microseconds * 1000);
  return nanosleep(&t, NULL);
}

unsigned sleep(unsigned seconds) {
  const struct timespec t = time_of(seconds * kSecond);
  struct timespec left = {0, 0};
  return nanosleep(&t, &left) == 0 ? 0 : (unsigned)left.tv_sec;
}

int setitimer(__itimer_which_t which, const struct itimerval* value, struct itimerval* before) {
  be_ready();
  struct itimerval t = *value;
  if (which == ITIMER_REAL) {
    t.it_value = divided_value(&value->it_value);
    t.it_interval = divided_value(&value->it_interval);
  }
  return REAL(setitimer)(which, &t, before);
}

long syscall(long number, ...) {
  be_ready();
  va_list list;
  va_start(list, number);
  long given[6];
  for (int i = 0; i < 6; i++) given[i] = va_arg(list, long);
  va_end(list);
  struct timespec t;
  if (number == SYS_futex && given[3] != 0) {
    const struct timespec* timeout = (const struct timespec*)given[3];
    const int what = (int)given[1] & FUTEX_CMD_MASK;
    if (what == FUTEX_WAIT) {
      t = divided(timeout);
      given[3] = (long)&t;
    } else if (what == FUTEX_WAIT_BITSET) {
      t = on((given[1] & FUTEX_CLOCK_REALTIME) != 0 ? CLOCK_REALTIME : CLOCK_MONOTONIC, timeout);
      given[3] = (long)&t;
    }
  }
  return REAL(syscall)(number, given[0], given[1], given[2], given[3], given[4], given[5]);
}
