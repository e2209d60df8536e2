// Small loops whose rates bound those of the kernels; bench/limits.py times them.
//
//   for rounds                      of one thread
//     for chains of registers       enough of them to hide the latency of an operation
//       x = step(x)                 no loads, no stores
//
// Loops of a score have the operations of that score's own loop, on registers instead of memory:
// the sum of its slots, on whatever units a processor has for them. Williams, Waterman and
// Patterson, "Roofline: an insightful visual performance model", 2009.
#include "cpu/base/limits.h"

#include "cpu/base/exp2.h"
#include "problem/host_device.h"
#ifdef __AVX512BF16__
#include "cpu/base/matrix_unit.h"
#endif

namespace fastattn::FASTATTN_ISA {
namespace {

constexpr int kChains = 12;

// What a loop has made goes here, or the compiler would leave the loop out.
FASTATTN_SIMD void consume(Vec x) {
  volatile float sink = sum_lanes(x);
  (void)sink;
}

// Takes kCount chains through step(), each from a number of its own.
template <int kCount, typename Step>
FASTATTN_SIMD void repeat(int64_t rounds, Step step) {
  Vec x[kCount];
  for (int n = 0; n < kCount; ++n) x[n] = splat(1.f / static_cast<float>(n + 2));
  for (int64_t round = 0; round < rounds; ++round)
#pragma GCC unroll 16
    for (int n = 0; n < kCount; ++n) x[n] = step(x[n]);
  for (int n = 1; n < kCount; ++n) x[0] += x[n];
  consume(x[0]);
}

// Each of the following does its rounds, and returns what it did.

__attribute__((noinline)) int64_t multiply_adds(int64_t rounds) {
  repeat<kChains>(rounds, [](Vec x) __attribute__((always_inline)) {
    return multiply_add(x, splat(0.5f), splat(1.f));
  });
  return rounds * kChains * kWidth * 2;
}

__attribute__((noinline)) int64_t pairs([[maybe_unused]] int64_t rounds) {
#ifdef __AVX512BF16__
  const auto ones = (__m512bh)_mm512_set1_epi32(0x3f803f80);
  repeat<kChains>(rounds, [=](Vec x) __attribute__((always_inline)) {
    return (Vec)_mm512_dpbf16_ps((__m512)x, ones, ones);
  });
  return rounds * kChains * kWidth * 4;
#else
  return 0;
#endif
}

__attribute__((noinline)) int64_t tiles([[maybe_unused]] int64_t rounds) {
#ifdef __AMX_BF16__
  const MatrixUnit unit;
  zero_tile<4>();
  zero_tile<6>();
  for (int64_t round = 0; round < rounds; ++round) {
    multiply_tile_registers<false, 0, 4, 6>();
    multiply_tile_registers<false, 1, 4, 6>();
    multiply_tile_registers<false, 2, 4, 6>();
    multiply_tile_registers<false, 3, 4, 6>();
  }
  return rounds * 4 * kEdge * kEdge * kTileDepth * 2;
#else
  return 0;
#endif
}

// x stays near 1, a number that 2^(x - 1) leaves as it is.
template <int kBits, bool kFlushes>
__attribute__((noinline)) int64_t exponentials(int64_t rounds) {
  repeat<8>(rounds, [](Vec x) __attribute__((always_inline)) {
    return exp2_weight<kBits, kFlushes>(x - 1.f);
  });
  return rounds * 8 * kWidth;
}

// Four terms of two queries share a division.
__attribute__((noinline)) int64_t additive_terms(int64_t rounds) {
  Vec x[2][4], sum[2] = {};
  for (int n = 0; n < 8; ++n) x[n / 4][n % 4] = splat(static_cast<float>(n));
  for (int64_t round = 0; round < rounds; ++round)
#pragma GCC unroll 2
    for (int r = 0; r < 2; ++r) {
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) x[r][n] = multiply_add(x[r][n], splat(0.5f), splat(1.f));
      const Vec left = x[r][0] + x[r][1], right = x[r][2] + x[r][3];
      const Vec left_den = x[r][0] * x[r][1], right_den = x[r][2] * x[r][3];
      sum[r] = minus_quotient(sum[r], left * right_den + right * left_den, left_den * right_den);
    }
  consume(sum[0] + sum[1]);
  return rounds * 8 * kWidth;
}

// Two terms of a query: their gradients add up over keys, over queries and in the weight.
__attribute__((noinline)) int64_t additive_gradients(int64_t rounds) {
  Vec x[2] = {splat(1.f), splat(2.f)}, weight[2] = {}, keys[2] = {}, queries[2] = {};
  const Vec ds = splat(0.25f);
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 2
    for (int n = 0; n < 2; ++n) x[n] = multiply_add(x[n], splat(0.5f), splat(1.f));
    const Vec reciprocal = quotient(splat(1.f), x[0] * x[1]);
#pragma GCC unroll 2
    for (int n = 0; n < 2; ++n) {
      const Vec u = reciprocal * x[1 - n], g = ds * u * u;
      weight[n] += ds * (splat(0.5f) - u);
      queries[n] += g * x[n];
      keys[n] += g * x[1 - n];
    }
  }
  consume(weight[0] + weight[1] + keys[0] + keys[1] + queries[0] + queries[1]);
  return rounds * 2 * kWidth;
}

__attribute__((noinline)) int64_t gaussian_terms(int64_t rounds) {
  repeat<8>(rounds, [](Vec x) __attribute__((always_inline)) {
    const Vec distance = (x - 1.f) * splat(0.5f);
    return multiply_add(distance, distance, splat(0.25f));
  });
  return rounds * 8 * kWidth;
}

// Of a thread's part of the memory.
__attribute__((noinline)) int64_t reads(int64_t rounds, const float* from, int64_t floats) {
  Vec x[8] = {};
  for (int64_t round = 0; round < rounds; ++round)
    for (int64_t n = 0; n + 8 * kWidth <= floats; n += 8 * kWidth)
#pragma GCC unroll 8
      for (int v = 0; v < 8; ++v) x[v] = max(x[v], load(from + n + v * kWidth));
  for (int v = 1; v < 8; ++v) x[0] += x[v];
  consume(x[0]);
  return rounds * floats * 4;
}

int64_t run(const LoopCall& call, int64_t thread, int64_t threads) {
  const int64_t share = call.floats / threads, r = call.rounds;
  switch (call.loop) {
    case Loop::kMultiplyAdd:
      return multiply_adds(r);
    case Loop::kPairs:
      return pairs(r);
    case Loop::kTiles:
      return tiles(r);
    case Loop::kExp2:
      return exponentials<24, false>(r);
    case Loop::kExp2OfHalf:
      return exponentials<11, true>(r);
    case Loop::kAdditive:
      return additive_terms(r);
    case Loop::kAdditiveGrad:
      return additive_gradients(r);
    case Loop::kGaussian:
      return gaussian_terms(r);
    case Loop::kRead:
      return reads(r, call.memory + thread * share, share);
  }
  return 0;
}

struct Threads {
  const LoopCall& call;
  int64_t count, work;
  static void body(void* context, int64_t begin, int64_t end) {
    auto& all = *static_cast<Threads*>(context);
    for (int64_t thread = begin; thread < end; ++thread)
      __atomic_fetch_add(&all.work, run(all.call, thread, all.count), __ATOMIC_RELAXED);
  }
};

}  // namespace

// Every thread runs the loop. Returns what they did together, 0 if the instruction set lacks it.
double run_loop(const LoopCall& call, const Parallel& parallel) {
  Threads all{call, max64(1, parallel.num_threads), 0};
  parallel.run(all.count, Threads::body, &all);
  return static_cast<double>(all.work);
}

}  // namespace fastattn::FASTATTN_ISA
