// Fibers: functions that can wait for each other within one thread. ucontext makes their stacks.
// The compiler's setjmp and longjmp switch, without the system calls of swapcontext (10 times
// faster). AddressSanitizer must know every switch, otherwise it reports another stack as an
// overflow. The functions that switch are not checked: in a checked one, a jump clears what is
// known of the stack.
#pragma once

#include <ucontext.h>

#include <cstddef>
#include <memory>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace cuda_on_cpu {

#define UNCHECKED __attribute__((no_sanitize("address")))

class Fiber {
 public:
  static constexpr size_t kStackBytes = 256 << 10;

  Fiber() : stack_(new char[kStackBytes]) {}

  // Sets the fiber to the start of body(context).
  void start(void (*body)(void*), void* context) {
    body_ = body, context_ = context;
    started_ = finished_ = false;
  }
  bool finished() const { return finished_; }

  // Runs the fiber until it waits or ends. The scheduler calls this.
  UNCHECKED void resume() {
    enter(stack_.get(), kStackBytes);
    if (__builtin_setjmp(scheduler_) == 0) {
      if (started_) jump(self_);
      started_ = true;
      ucontext_t context;
      getcontext(&context);
      context.uc_stack.ss_sp = stack_.get();
      context.uc_stack.ss_size = kStackBytes;
      context.uc_link = nullptr;
      running_ = this;
      makecontext(&context, run, 0);
      setcontext(&context);
    }
    leave(false);
  }

  // Switches back to the scheduler. The fiber calls this.
  UNCHECKED void wait() {
    enter(scheduler_stack_, scheduler_size_);
    if (__builtin_setjmp(self_) == 0) jump(scheduler_);
    leave(true);
  }

 private:
  using Place = void* [5];  // as the compiler documents it

  UNCHECKED __attribute__((noinline)) static void jump(Place& place) {
    __builtin_longjmp(place, 1);
  }

  UNCHECKED static void run() {
    Fiber* const self = running_;
    self->leave(true);
    self->body_(self->context_);
    self->finished_ = true;
    self->enter(scheduler_stack_, scheduler_size_);
    jump(self->scheduler_);
  }

#if defined(__SANITIZE_ADDRESS__)
  void enter(const void* stack, size_t size) {
    __sanitizer_start_switch_fiber(&fake_stack_, stack, size);
  }
  void leave(bool into_fiber) {
    const void* from = nullptr;
    size_t size = 0;
    __sanitizer_finish_switch_fiber(fake_stack_, &from, &size);
    if (into_fiber) scheduler_stack_ = from, scheduler_size_ = size;
  }
  void* fake_stack_ = nullptr;
#else
  void enter(const void*, size_t) {}
  void leave(bool) {}
#endif

  static inline Fiber* running_ = nullptr;
  static inline const void* scheduler_stack_ = nullptr;
  static inline size_t scheduler_size_ = 0;

  std::unique_ptr<char[]> stack_;
  void (*body_)(void*) = nullptr;
  void* context_ = nullptr;
  bool started_ = false, finished_ = true;
  Place self_, scheduler_;
};

}  // namespace cuda_on_cpu
