// Dynamic scheduling: workers pull task numbers from a counter, so that uneven tasks even out.
#pragma once

#include "cpu/simd.h"

namespace fastattn::FASTATTN_ISA {

// Problems with fewer multiply-adds than this run on the calling thread: waking others takes about
// as long.
constexpr double kParallelWork = 1 << 19;

// Calls worker.run(task) for every 0 <= task < count, where each thread has made its own
// Worker(args).
template <typename Worker, typename Args>
class TaskLoop {
 public:
  static void run(const Args& args, int64_t count, double work, const Parallel& parallel) {
    TaskLoop loop{args, count};
    const bool alone = work < kParallelWork || count <= 1 || parallel.num_threads <= 1;
    if (alone) return body(&loop, 0, 1);
    parallel.run(parallel.num_threads < count ? parallel.num_threads : count, body, &loop);
  }

 private:
  TaskLoop(const Args& args, int64_t count) : args_(args), count_(count) {}

  static void body(void* context, int64_t, int64_t) {
    auto& loop = *static_cast<TaskLoop*>(context);
    int64_t task = loop.next();
    if (task >= loop.count_) return;
    Worker worker(loop.args_);
    for (; task < loop.count_; task = loop.next()) worker.run(task);
  }

  int64_t next() { return __atomic_fetch_add(&next_, 1, __ATOMIC_RELAXED); }

  const Args& args_;
  int64_t count_, next_ = 0;
};

}  // namespace fastattn::FASTATTN_ISA
