// Dynamic scheduling: workers take task numbers from counters, which balances uneven tasks.
#pragma once

#include "cpu/base/simd.h"
#include "problem/host_device.h"

namespace fastattn::FASTATTN_ISA {

// Calls worker.run(task) for every 0 <= task < count. Each thread makes its own Worker(args).
// `work`: multiply-adds; other threads help from args.path.parallel_work on. A thread begins with
// neighbouring tasks, whose memory is also adjacent. Then it takes tasks of other threads.
template <typename Worker, typename Args>
class TaskLoop {
 public:
  static void run(const Args& args, int64_t count, double work, const Parallel& parallel) {
    const bool alone = work < args.path.parallel_work || count <= 1 || parallel.num_threads <= 1;
    const int64_t threads = alone ? 1 : min64(parallel.num_threads, count);
    TaskLoop loop{args, count, min64(threads, kMostShares)};
    if (alone) return body(&loop, 0, 1);
    parallel.run(threads, body, &loop);
  }

 private:
  static constexpr int64_t kMostShares = 64;  // with more threads, some share one
  struct alignas(64) Share {
    int64_t next, end;
  };

  TaskLoop(const Args& args, int64_t count, int64_t shares) : args_(args), shares_(shares) {
    for (int64_t n = 0; n < shares; ++n) share_[n] = {count * n / shares, count * (n + 1) / shares};
  }

  static void body(void* context, int64_t begin, int64_t) {
    auto& loop = *static_cast<TaskLoop*>(context);
    const int64_t own = begin % loop.shares_;
    int64_t passed = 0, task = loop.next(own, &passed);
    if (task < 0) return;
    Worker worker(loop.args_);
    for (; task >= 0; task = loop.next(own, &passed)) worker.run(task);
  }

  // A task of this thread's share, else of the next ones; -1 when all `passed` are empty.
  int64_t next(int64_t own, int64_t* passed) {
    for (; *passed < shares_; ++*passed) {
      Share& from = share_[(own + *passed) % shares_];
      const int64_t task = __atomic_fetch_add(&from.next, 1, __ATOMIC_RELAXED);
      if (task < from.end) return task;
    }
    return -1;
  }

  const Args& args_;
  int64_t shares_;
  Share share_[kMostShares];
};

}  // namespace fastattn::FASTATTN_ISA
