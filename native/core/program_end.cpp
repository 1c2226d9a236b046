#include "program_end.hpp"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <exception>

namespace farcall {

namespace {

pthread_t ending_thread;
std::terminate_handler usual_terminate = nullptr;
struct sigaction usual_abort;

bool is_ending_thread() { return pthread_equal(pthread_self(), ending_thread) != 0; }

[[noreturn]] void park() {
  while (true) pause();
}

[[noreturn]] void on_terminate() {
  if (!is_ending_thread()) park();
  if (usual_terminate != nullptr) usual_terminate();
  std::abort();
}

// glibc aborts by itself when somebody catches what `pthread_exit` throws, and keeps it.
void on_abort(int) {
  if (!is_ending_thread()) park();
  sigaction(SIGABRT, &usual_abort, nullptr);
  raise(SIGABRT);  // when this returns
}

void on_exit_of_process(int status, void*) {
  fflush_unlocked(nullptr);  // a thread that waits for the end may hold the lock of a file
  _exit(status);
}

}  // namespace

void park_dying_threads() {
  if (usual_terminate != nullptr) return;
  ending_thread = pthread_self();
  usual_terminate = std::set_terminate(on_terminate);
  struct sigaction action = {};
  action.sa_handler = on_abort;
  sigaction(SIGABRT, &action, &usual_abort);
}

void skip_static_destructors() { on_exit(on_exit_of_process, nullptr); }

}  // namespace farcall
