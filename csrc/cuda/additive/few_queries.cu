// Additive attention of a few queries over many keys, as in decoding. A block has one row, so rows
// do not share exponentials: every pair and dim takes one. Keys are read where they lie.
//
//   for (b, h, i, chunk of keys)        one block
//     for tiles of kThreads keys        one key per thread
//       s = score, masked, biased       keys pass through shared memory, transposed
//       online softmax over the block
//       o = alpha o + w V               one column per thread, two halves of the tile
//     o, m, l to the workspace
//   merge.cuh                           merges chunks in order; writes out, lse, stats
//   for (b, h or mean, i, keys)         weights, from the scores in the workspace
#include "cuda/additive/few_queries.cuh"
#include "cuda/additive/prepare.cuh"
#include "cuda/additive/terms.cuh"
#include "cuda/tile/curve.cuh"
#include "cuda/tile/merge.cuh"
#include "cuda/tile/softmax.cuh"

namespace fastattn::cuda {
namespace {

constexpr int kKeyStride = kThreads + 1;  // of staged keys: each dim's lane has a bank of its own
constexpr int kParts = kThreads / kTile;

constexpr size_t few_shared(int64_t dims, int64_t E) {
  return sizeof(float) *
         (kStage * kKeyStride + kThreads + kWarps + static_cast<size_t>(2 * dims + kParts * E));
}
static_assert(few_shared(kMaxDims, kMaxValues) <= kSharedLimit);

struct FewArgs {
  ForwardParams p;
  AdditiveForwardPlan plan;

  SharedBytes shared() const {
    return {few_shared(plan.panels.dims, p.E), few_shared(kMaxDims, kMaxValues)};
  }
};

struct FewMemory {
  float *keys, *weights, *scratch, *query, *units, *o;  // o: [kParts][E]
};

FASTATTN_DEVICE FewMemory few_memory(const FewArgs& a) {
  float* const keys = static_cast<float*>(shared_memory());
  float* const weights = keys + kStage * kKeyStride;
  float* const scratch = weights + kThreads;
  float* const query = scratch + kWarps;
  float* const units = query + a.plan.panels.dims;
  return {keys, weights, scratch, query, units, units + a.plan.panels.dims};
}

// One query and keys [j0, j0 + cols).
struct Row {
  int64_t b, h, hkv, i, number, j0;
  int cols;
};

FASTATTN_DEVICE Row row_of(const AttentionParams& p, uint32_t number) {
  uint32_t block = number;
  const int64_t i = take_digit(&block, p.M), h = take_digit(&block, p.H), b = block;
  return {b, h, static_cast<int>(h) / group_size(p), i, number, 0, 0};
}

FASTATTN_DEVICE void load_query(const FewArgs& a, const Row& at, const FewMemory& memory) {
  const Panels& panels = a.plan.panels;
  const float* const units =
      static_cast<const float*>(a.p.workspace) + panels.units + at.h * panels.dims;
  const int64_t offset = offset_of(a.p.q, at.b, at.h, at.i, 0);
  for (int64_t d = thread(); d < panels.dims; d += kThreads) {
    memory.query[d] = d < a.p.D ? load_element(a.p.q, offset + d * a.p.q.stride_c) : 0.f;
    memory.units[d] = units[d];
  }
}

// to[d][j] = element (j, d) from `offset` on; 0 outside rows x dims.
FASTATTN_DEVICE void stage_few_keys(const View& k, int64_t offset, int rows, int dims, float* to) {
  constexpr int kStep = kThreads / kStage;
  const int d = thread() % kStage;
  with_dtype(k.dtype, [&](auto type) {
    int64_t n = opaque(offset + thread() / kStage * k.stride_r + d * k.stride_c);
#pragma unroll 4
    for (int j = thread() / kStage; j < kThreads; j += kStep, n += kStep * k.stride_r)
      to[d * kKeyStride + j] = j < rows && d < dims ? load_as<type>(k.data, n) : 0.f;
  });
}

// The score of this thread's key, or what a curve makes of it. Begins with a barrier.
FASTATTN_DEVICE float score_key(const FewArgs& a, const Row& at, const FewMemory& memory) {
  const Panels& panels = a.plan.panels;
  const float* const workspace = static_cast<const float*>(a.p.workspace);
  float s = 0.f;
  for (int64_t d0 = 0; d0 < panels.dims; d0 += kStage) {
    const int count = static_cast<int>(min64(kStage, panels.dims - d0));
    __syncthreads();
    stage_few_keys(a.p.k, offset_of(a.p.k, at.b, at.hkv, at.j0, d0), at.cols,
                   static_cast<int>(min64(kStage, a.p.D - d0)), memory.keys);
    __syncthreads();
    float sum = workspace[panels.halves + at.h * panels.stages + d0 / kStage];
#pragma unroll 4
    for (int d = 0; d < count; d += 2) {
      const float* const key = memory.keys + d * kKeyStride + thread();
      const float* const query = memory.query + d0 + d;
      const float* const unit = memory.units + d0 + d;
      const float x0 = denominator<true>(query[0], key[0], unit[0]);
      const float x1 = denominator<true>(query[1], key[kKeyStride], unit[1]);
      sum = subtract_pair(sum, x0, x1);
    }
    s += sum;
  }
  return curved(a.p, scaled_score(s, kUnit, workspace[panels.scales + at.h]));
}

// The logit of a score. A bias of -inf masks the key, and the result is -inf.
FASTATTN_DEVICE float masked_score(const AttentionParams& p, const Row& at, float s) {
  if (p.bias.data == nullptr) return s;
  const int64_t offset = offset_of(p.bias, at.b, at.h, at.i, at.j0 + thread());
  const float bias = load_element(p.bias, offset);
  return bias == -kInfinity ? bias : fmaf(s, natural_of_score(p), bias);
}

FASTATTN_DEVICE float few_dropped(const AttentionParams& p, int64_t b, int64_t h, int64_t i,
                                  int64_t j, float x) {
  if (!p.dropout.enabled) return x;
  const PhiloxBlock block = random_block(p.dropout, seed_of(p.dropout), b, h, i, j);
  const uint32_t word = random_word(block, static_cast<int>(j % 4));
  return dropped(p, word >= p.dropout.threshold, x);
}

// o = alpha o + w V over the tile. `masked`: some keys are, and have no weight.
// Keys take turns with kChains sums. One sum would round at every key, and each addition would wait
// for the last.
FASTATTN_DEVICE void add_few_values(const FewArgs& a, const Row& at, bool masked, float alpha,
                                    const FewMemory& memory) {
  constexpr int kChains = 4;
  const View& v = a.p.v;
  const int part = thread() / kTile, end = min(at.cols, (part + 1) * kTile);
  with_dtype(v.dtype, [&](auto type) {
    for (int64_t e = thread() % kTile; e < a.p.E; e += kTile) {
      const int64_t offset = opaque(offset_of(v, at.b, at.hkv, at.j0, e));
      float sums[kChains] = {};
#pragma unroll 1
      for (int j = part * kTile; j < end; j += kChains) {
        float values[kChains];
#pragma unroll
        for (int n = 0; n < kChains; ++n)  // past the end the last key again, without a weight
          values[n] = load_as<type>(v.data, offset + min(j + n, end - 1) * v.stride_r);
#pragma unroll
        for (int n = 0; n < kChains; ++n) {
          const float w = memory.weights[j + n];
          sums[n] = masked && is_no_weight(w) ? sums[n] : fmaf(w, values[n], sums[n]);
        }
      }
      float& o = memory.o[part * a.p.E + e];
      o = fmaf(o, alpha, (sums[0] + sums[1]) + (sums[2] + sums[3]));
    }
  });
}

__global__ void __launch_bounds__(kThreads, 8)
    additive_few_kernel(const __grid_constant__ FewArgs a) {
  const ForwardParams& p = a.p;
  const FewMemory memory = few_memory(a);
  uint32_t block = blockIdx.x;
  const int64_t chunk = take_digit(&block, a.plan.chunks);
  Row at = row_of(p, block);
  load_query(a, at, memory);
  for (int64_t n = thread(); n < kParts * p.E; n += kThreads) memory.o[n] = 0.f;
  __syncthreads();

  const KeyRange keys = row_range(p.mask, p.N, at.b, at.i);
  const int64_t begin = max64(chunk * a.plan.chunk_keys, keys.begin / kThreads * kThreads);
  const int64_t end = min64((chunk + 1) * a.plan.chunk_keys, keys.end);
  const float unit = unit_of(p);
  float m = -kInfinity, l = 0.f;
  for (at.j0 = begin; at.j0 < end; at.j0 += kThreads) {
    at.cols = static_cast<int>(min64(kThreads, end - at.j0));
    const int64_t j = at.j0 + thread();
    const bool inside = thread() < at.cols && keeps(p.mask, p.N, at.b, at.h, at.i, j);
    float s = score_key(a, at, memory);
    s = inside ? masked_score(p, at, s) : -kInfinity;
    if (p.weights_mode != WeightsMode::kNone && thread() < at.cols)
      static_cast<float*>(p.workspace)[a.plan.scores + at.number * p.N + j] = s;
    const bool masked = !__syncthreads_and(s != -kInfinity);

    const float m_new = late_max(m, block_max(s, memory.scratch), unit), shift = finite_max(m_new);
    const float alpha = rescaling(m, shift, unit), w = rescaling(s, shift, unit);
    m = m_new;
    l = l * alpha + w;
    memory.weights[thread()] = s == -kInfinity ? kNoWeight : few_dropped(p, at.b, at.h, at.i, j, w);
    __syncthreads();
    add_few_values(a, at, masked, alpha, memory);
  }

  l = block_sum(l, memory.scratch);
  float* const to = partial_at(p, a.plan.partials, blockIdx.x);
  for (int64_t e = thread(); e < p.E; e += kThreads) to[e] = memory.o[e] + memory.o[p.E + e];
  if (thread() == 0) to[p.E] = m, to[p.E + 1] = l;
}
static_assert(kParts == 2);

__global__ void __launch_bounds__(kThreads)
    additive_few_weights_kernel(const __grid_constant__ FewArgs a) {
  const ForwardParams& p = a.p;
  const int64_t heads = p.weights_mode == WeightsMode::kMean ? p.H : 1;
  uint32_t block = blockIdx.x;
  const int64_t j = take_digit(&block, ceil_div(p.N, kThreads)) * kThreads + thread();
  const int64_t i = take_digit(&block, p.M), head_out = take_digit(&block, heads_out(p)), b = block;
  if (j >= p.N) return;
  float sum = 0.f;
  for (int64_t h = head_out * heads; h < (head_out + 1) * heads; ++h) {
    if (!keeps(p.mask, p.N, b, h, i, j)) continue;
    const int64_t row = (b * p.H + h) * p.M + i;
    const float s = static_cast<const float*>(p.workspace)[a.plan.scores + row * p.N + j];
    if (s == -kInfinity) continue;
    const float weight = known_weight(s, p.stats[2 * row], p.stats[2 * row + 1], unit_of(p));
    sum += few_dropped(p, b, h, i, j, weight);
  }
  sum *= 1.f / static_cast<float>(heads);
  store_element(p.weights, offset_of(p.weights, b, head_out, i, j), sum);
}

}  // namespace

void additive_few(const ForwardParams& p, const AdditiveForwardPlan& plan, Launcher& launcher) {
  const FewArgs args = {p, plan};
  const int64_t rows = p.B * p.H * p.M;
  prepare_terms(p, plan.panels, static_cast<float*>(p.workspace), launcher);
  launcher.run(additive_few_kernel, rows * plan.chunks, kThreads, args.shared(), args);
  merge_partials(p, plan.partials, plan.chunks, launcher);
  if (p.weights_mode == WeightsMode::kNone) return;
  const int64_t rows_out = p.B * min64(p.H, heads_out(p)) * p.M;
  launcher.run(additive_few_weights_kernel, rows_out * ceil_div(p.N, kThreads), kThreads, 0, args);
}

}  // namespace fastattn::cuda
