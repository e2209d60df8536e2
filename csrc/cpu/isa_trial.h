// Tries an instruction in a child process. If the machine lacks it, only the child dies.
#pragma once

#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>

namespace fastattn::cpu {

// Whether code() returns true in a child of this process; false if the child dies or cannot start.
// Other threads may hold any lock, so code() may only do what a signal handler may do.
inline bool true_in_child(bool (*code)()) {
  // fork() would run the handlers of pthread_atfork(), and the program's own SIGCHLD handling could
  // reap this child. Without flags, memory is copied and the end sends no SIGCHLD.
  const long child = syscall(SYS_clone, 0, nullptr, nullptr, nullptr, nullptr);
  if (child == 0) {
    signal(SIGILL, SIG_DFL);  // instead of Python's faulthandler
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
