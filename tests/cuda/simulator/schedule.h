// Which of the legal orders a block runs in, and what runtime.cpp offers to async.cpp.
//
// Schedule 0: warps in turn, up and down from barrier to barrier, odd blocks down first; copies and
// products as late as possible. Others draw the order at random; by the number's bits, products
// early, copies early, and one warp that runs when no other can. Lanes get apart then: those behind
// one that waits may run after other warps.
#pragma once

#include <functional>
#include <random>

#include "cuda_runtime.h"

namespace cuda_on_cpu {

struct Schedule {
  unsigned number = 0;
  int victim = -1;  // the first thread of the starved warp
  std::mt19937 random;

  void begin(unsigned block, int threads) {
    random.seed(number * 97 + block);
    const unsigned warps = (static_cast<unsigned>(threads) + 31) / 32;
    victim = (number & 4) != 0 ? static_cast<int>(random() % warps) * 32 : -1;
  }
  bool in_turn() const { return number == 0; }
  bool early_products() const { return (number & 1) != 0; }
  bool early_copies() const { return (number & 2) != 0; }
  bool chance(unsigned of) { return random() % of == 0; }
};
extern Schedule schedule;

int current_thread();

// Suspends the running thread until `ready` says true.
void wait_until(std::function<bool()> ready, Site here);

// Suspends it while the others run so many times, at most kPatience.
constexpr unsigned kPatience = 4;
void let_others_run(unsigned times, Site here);

// Ends the block with this message.
[[noreturn, gnu::format(printf, 2, 3)]] void fail_block(Site here, const char* format, ...);

}  // namespace cuda_on_cpu
