// Tries an instruction that the machine may lack, in a child process, which dies of it instead.
#pragma once

#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>

namespace fastattn::cpu {

// Whether code() returns true in a child of this process; false if it dies there, or there can be
// no child. Other threads may hold any lock, so code() may do only what a signal handler may.
inline bool true_in_child(bool (*code)()) {
  // fork() would run the handlers of pthread_atfork(), and the program's own handling of children
  // could see and reap this one. No flags: memory is copied, and the end is no SIGCHLD.
  const long child = syscall(SYS_clone, 0, nullptr, nullptr, nullptr, nullptr);
  if (child == 0) {
    signal(SIGILL, SIG_DFL);  // not Python's faulthandler
    signal(SIGSEGV, SIG_DFL);
    const rlimit none = {0, 0};
    setrlimit(RLIMIT_CORE, &none);
    prctl(PR_SET_DUMPABLE, 0);  // a core dump that is piped to a program ignores the limit
    _exit(code() ? 0 : 1);
  }
  if (child < 0) return false;
  int status = 0;
  while (waitpid(static_cast<pid_t>(child), &status, __WCLONE) < 0)
    if (errno != EINTR) return false;
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace fastattn::cpu
