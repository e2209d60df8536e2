// A small kernel of copies, barriers and products of a warpgroup, right and wrong: what the
// simulator can run, and which mistakes it finds.
#include "cuda/base/ptx_wgmma.cuh"
#include "cuda/base/reduce.cuh"
#include "cuda/base/tensor_map.h"

namespace fastattn::cuda {
namespace {

enum Mistake : int {
  kNone,
  kWrongStretch,       // a descriptor's distance between groups of rows
  kWrongPanel,         // a descriptor's distance between panels
  kUnpublished,        // barriers that others do not see yet
  kHalfTheBytes,       // expected of a copy
  kNoWaitForEmpty,     // the producer overwrites what is in use
  kWrongParity,        // the producer waits for a phase that is never complete
  kNoWaitForFull,      // products of what has not come
  kNoWaitForScores,    // sums are read while they are made
  kNoFence,            // before a group
  kWeightsTooEarly,    // operands are written while a product reads them
  kReleasedTooEarly,   // a stage is given back while a product reads it
  kNobodyWaits,        // for the last products
  kOneWarpLess,        // a product that not all warps issue
  kOneWarpsRegisters,  // a warpgroup of which one warp keeps its registers
  kFewerTaken,         // registers, than there were at first
  kNothingGiven,       // back, of the registers that others take
  kUnaligned,          // a box at an address that is no multiple of 1024
};

constexpr int kRows = 64, kKeys = 128, kStages = 2, kBlock = 3 * kWarpgroup;

struct alignas(1024) Memory {
  uint16_t q[kRows * kPanel];
  uint16_t k[kStages][kKeys * kPanel], v[kStages][2][kKeys * kPanel];
  Barrier q_full, full[kStages], empty[kStages];
};

struct Args {
  CUtensorMap q, k, v;
  float* out;  // [64][128]
  int tiles, mistake;
};

void produce(const Args& a, Memory& m) {
  const uint32_t part = a.mistake == kHalfTheBytes ? 2 : 1;
  arrive_and_expect(&m.q_full, sizeof(m.q) / part);
  load_box(m.q + (a.mistake == kUnaligned ? 8 : 0), a.q, &m.q_full, 0, 0, 0, 0);
  for (int n = 0; n < a.tiles; ++n) {
    const int s = n % kStages;
    const uint32_t parity = n / kStages % 2 ^ (a.mistake == kWrongParity ? 0u : 1u);
    if (a.mistake != kNoWaitForEmpty) wait_for_phase(&m.empty[s], parity);
    arrive_and_expect(&m.full[s], sizeof(m.k[s]) + sizeof(m.v[s]));
    load_box(m.k[s], a.k, &m.full[s], 0, n * kKeys, 0, 0);
    for (int c = 0; c < 2; ++c) load_box(m.v[s][c], a.v, &m.full[s], c * kPanel, n * kKeys, 0, 0);
  }
}

void start_scores(const Args& a, const Memory& m, int stage, float (&s)[16][4]) {
  const OperandShape shape = {0, a.mistake == kWrongStretch ? 512u : 1024u};
  hold(s);
  if (a.mistake != kNoFence) fence_products();
  for (uint32_t n = 0; n < 4; ++n)
    if (a.mistake != kOneWarpLess || n < 3 || warp() != 2)
      multiply_shared<DType::kBFloat16>(s, advance(describe(m.q, shape), n * 2),
                                        advance(describe(m.k[stage], shape), n * 2), n > 0);
  commit_products();
}

void start_values(const Args& a, const Memory& m, int stage, const uint32_t (&w)[8][4],
                  float (&o)[16][4]) {
  const OperandShape shape = {a.mistake == kWrongPanel ? 8192u : 16384u, 1024};
  hold(o);
  fence_products();
  for (uint32_t n = 0; n < 8; ++n)
    multiply_registers<DType::kBFloat16, true>(o, w[n],
                                               advance(describe(m.v[stage], shape), n * 128), true);
  commit_products();
}

void pack(const float (&s)[16][4], uint32_t (&w)[8][4]) {
  for (int n = 0; n < 32; ++n)
    w[n / 4][n % 4] = pack_pair<DType::kBFloat16>(s[n / 2][n % 2 * 2], s[n / 2][n % 2 * 2 + 1]);
}

void release(Barrier* empty) {
  if (lane() == 0) arrive(empty);
}

void consume(const Args& a, Memory& m) {
  float o[16][4] = {}, s[16][4] = {};
  uint32_t w[8][4] = {};
  wait_for_phase(&m.q_full, 0);
  for (int n = 0; n < a.tiles; ++n) {
    const int stage = n % kStages;
    if (a.mistake != kNoWaitForFull) wait_for_phase(&m.full[stage], n / kStages % 2);
    start_scores(a, m, stage, s);
    if (a.mistake != kNoWaitForScores) wait_for_products<0>();
    hold(s);
    pack(s, w);
    start_values(a, m, stage, w, o);
    if (a.mistake == kReleasedTooEarly) release(&m.empty[stage]);
    if (a.mistake == kWeightsTooEarly) w[3][1] = 0;
    if (a.mistake != kNobodyWaits) wait_for_products<0>();
    hold(o);
    if (a.mistake != kReleasedTooEarly) release(&m.empty[stage]);
  }
  const int row = warp() * 16 + lane() / 4, column = lane() % 4 * 2;
  for (int v = 0; v < 64; ++v)
    a.out[(row + v / 2 % 2 * 8) * 128 + column + v / 4 * 8 + v % 2] = o[v / 4][v % 4];
}

__global__ void async_kernel(Args a) {
  Memory& m = *static_cast<Memory*>(shared_boxes());
  if (thread() == 0) {
    init_barrier(&m.q_full, 1);
    for (int n = 0; n < kStages; ++n) init_barrier(&m.full[n], 1), init_barrier(&m.empty[n], 4);
    if (a.mistake != kUnpublished) publish_barriers();
  }
  __syncthreads();
  if (thread() >= kWarpgroup) {
    if (a.mistake == kOneWarpsRegisters && warp() == 5) return;
    if (a.mistake != kNothingGiven) give_registers<24>();
    if (thread() == kWarpgroup) produce(a, m);
  } else {
    if (a.mistake == kFewerTaken) {
      take_registers<160>();
    } else {
      take_registers<240>();
    }
    consume(a, m);
  }
}

}  // namespace
}  // namespace fastattn::cuda

// out [64][128] = sum over tiles of (q k^T) v, for q [64][64], k [keys][64], v [keys][128], bf16.
extern "C" const char* shim_async(uint16_t* q, uint16_t* k, uint16_t* v, float* out, int64_t keys,
                                  int mistake) {
  using namespace fastattn;
  using namespace fastattn::cuda;
  Args a = {{}, {}, {}, out, static_cast<int>((keys + kKeys - 1) / kKeys), mistake};
  const auto map = [](uint16_t* data, int64_t rows, int64_t columns, int box, CUtensorMap* to) {
    const View view = {data, DType::kBFloat16, 0, 0, columns, 1};
    return make_tensor_map(view, {1, 1, rows, columns}, box, to);
  };
  cudaFuncSetAttribute(async_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Memory));
  if (!map(q, kRows, 64, kRows, &a.q) || !map(k, keys, 64, kKeys, &a.k) ||
      !map(v, keys, 128, kKeys, &a.v))
    return "no tensor map";
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1), config.blockDim = dim3(kBlock);
  config.dynamicSmemBytes = sizeof(Memory);
  const cudaError_t error = cudaLaunchKernelEx(&config, async_kernel, a);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
