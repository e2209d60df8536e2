// Scaled dot-product attention, forward, on tensor cores; fp16 and bf16, fp32 sums:
//
//   out_i = sum_j w_ij v_j / sum_j w_ij      w_ij = e^(s_ij - m_i)      lse_i = ln sum_j e^(s_ij)
//
//   for (b, h, tile of 64 queries)       a block of 4 warps, 16 queries each; Q in shared memory,
//     for key tiles that some row keeps  O, m, l in registers; K, V copied one tile ahead
//       S = Q K^T                        in registers
//       S -> logits, masked -> P         online softmax; P stays in registers
//       O = alpha O + P V
//     out = O / l, lse, stats
//
// Few queries (few_queries.h) are one tile of 16. Blocks share its keys in chunks, and the warps of
// a block share the keys of a tile. Each warp writes its O, m, l to the workspace, for merge.cu.
//
// Saved for backward: stats, the maximum of a row and 1 / sum. Returned weights come from a second
// sweep that recomputes scores and uses the stats. Dao, "FlashAttention-2: faster attention with
// better parallelism and work partitioning", 2023.
#include "cuda/base/ptx_wgmma.cuh"
#include "cuda/dot/forward.cuh"
#include "cuda/dot/forward_wgmma.h"
#include "cuda/dot/passes.h"
#include "cuda/tile/merge.cuh"

namespace fastattn::cuda {
namespace {

struct SdpaArgs {
  ForwardParams p;
  int64_t chunk_keys, chunks;  // for few queries
  const uint32_t* marks;       // of tiles that are to be computed (forward_wgmma.h); nullptr: all
};

bool is_few(const AttentionParams& p) { return p.M <= kFewQueries; }

// Chunks have at least four tiles, so that copies can run ahead.
SdpaArgs plan(const ForwardParams& p) {
  if (!is_few(p)) return {p, 0, 1, nullptr};
  constexpr int64_t kChunk = 4 * kTile, kMaxChunks = kMaxParts / kWarps;
  const int64_t keys = max64(1, ceil_div(p.N, kMaxChunks * kChunk)) * kChunk;
  return {p, keys, max64(1, ceil_div(p.N, keys)), nullptr};
}

// Columns of V and of the sums of a block: as many as fit the registers.
template <int kDim>
constexpr int kSumsOf = kDim < kMostColumns ? kDim : kMostColumns;

template <int kDim>
struct __align__(16) SdpaMemory {
  uint16_t q[kTile * kDim];
  uint16_t k[2][kTile * kDim], v[2][kTile * kSumsOf<kDim>];
  uint32_t bad_rows[kWarps];  // of a tile of V
  uint32_t left;              // for_tiles()
};

// Writes this warp's part of the rows.
template <int kDim>
FASTATTN_DEVICE void write_parts(const SdpaArgs& a, const Place& at, int64_t chunk,
                                 const SdpaState& state, const float (&o)[kDim / 8][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = quad_row(2 * half);
    const float l = lanes_sum(state.l[half], kQuad);
    if (row >= at.rows) continue;
    const int64_t part = query_number(a.p, at, row) * a.chunks + chunk;
    float* const to = partial_at(a.p, 0, part * kWarps + warp());
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
      for (int v = 0; v < 2; ++v)
        if (sum_col(n, v) < a.p.E) to[sum_col(n, v)] = o[n][2 * half + v];
    if (lane() % kQuad == 0) to[a.p.E] = state.m[half], to[a.p.E + 1] = l;
  }
}

// The block's queries where they are few. Heads that share keys are neighbours, and find these keys
// in a cache.
FASTATTN_DEVICE Place few_queries(const SdpaArgs& a, uint32_t block, int64_t* chunk) {
  const int64_t h = take_digit(&block, a.p.H);
  *chunk = take_digit(&block, a.chunks);
  return place(a.p, block, h, 0, 0);
}

template <typename Layout, DType kType, int kDim, bool kCurved>
FASTATTN_DEVICE void sdpa_forward_tile(const SdpaArgs& a, uint32_t tile) {
  constexpr bool kFew = std::is_same_v<Layout, FewQueryRows>;
  constexpr int kSums = kSumsOf<kDim>;
  SdpaMemory<kDim>& memory = *static_cast<SdpaMemory<kDim>*>(shared_memory());
  const ForwardParams& p = a.p;
  const float unit = unit_of(p);
  int64_t chunk = 0;
  Place at = kFew ? few_queries(a, tile, &chunk)
                  : query_place(p, ceil_div(p.M, kTile), tile, a.marks == nullptr);
  KeyRange keys = tile_range(p.mask, p.N, at.b, at.i0, at.i0 + at.rows);
  if (kFew) {
    keys.begin = max64(keys.begin, chunk * a.chunk_keys);
    keys.end = min64(keys.end, (chunk + 1) * a.chunk_keys);
  }
  at.j0 = keys.begin / kTile * kTile;

  SdpaState state = {{-kInfinity, -kInfinity}, {0.f, 0.f}};
  float o[kSums / 8][4] = {};
  TileMask mask{};
  bool more = next_tile<Layout>(p, keys.end, at, mask);
  if (more) {
    start_queries<kDim>(p.q, p.D, at, memory.q);
    start_keys<kDim>(p.k, p.D, at, memory.k[0]);
    start_keys<kSums>(p.v, p.E, at, memory.v[0]);
  }
  for (int buffer = 0; more; buffer ^= 1) {
    const Place here = at;
    const TileMask mask_here = mask;
    wait_for_copies();
    __syncthreads();
    at.j0 += kTile;
    more = next_tile<Layout>(p, keys.end, at, mask);
    if (more) {
      start_keys<kDim>(p.k, p.D, at, memory.k[buffer ^ 1]);
      start_keys<kSums>(p.v, p.E, at, memory.v[buffer ^ 1]);
    }

    Pairs<Layout> s;
    SdpaStep step;
    float alpha[2];
    sdpa_logits<Layout, kType, kDim, kCurved>(p, here, mask_here, memory.q, memory.k[buffer], s);
    sdpa_softmax_step<true>(unit, rcp_approx(unit), state, s, step);
    sdpa_add_sums(unit, step, state, alpha);
    drop(p, surviving_bits<Layout>(p, here), s);
#pragma unroll
    for (int n = 0; n < kSums / 8; ++n)
#pragma unroll
      for (int v = 0; v < 4; ++v) o[n][v] *= alpha[v / 2];
    add_product<Layout, kType, kSums>(p.v, offset_of(p.v, here.b, here.hkv, here.j0, 0), p.E,
                                      mask_here, s, memory.v[buffer], memory.bad_rows, o);
  }
  if constexpr (kFew) {
    write_parts<kSums>(a, at, chunk, state, o);
  } else {
    write_rows<kType, kSums>(p, at, state, o);
  }
}

template <typename Layout, DType kType, int kDim, bool kCurved>
__global__ void __launch_bounds__(kThreads, 2)
    sdpa_forward_kernel(const __grid_constant__ SdpaArgs a) {
  if (kDim > kMostColumns && !is_for_wgmma()) return;
  for_tiles(a.marks, a.p.B * a.p.H * ceil_div(a.p.M, kTile),
            static_cast<SdpaMemory<kDim>*>(shared_memory())->left,
            [&](uint32_t tile) { sdpa_forward_tile<Layout, kType, kDim, kCurved>(a, tile); });
}

// ---- returned weights ----

// A block writes a tile: per head, or the mean of heads, added up in head order.
template <DType kType, int kDim, bool kCurved>
__global__ void __launch_bounds__(kThreads, 2)
    sdpa_weights_kernel(const __grid_constant__ ForwardParams p) {
  SdpaMemory<kDim>& memory = *static_cast<SdpaMemory<kDim>*>(shared_memory());
  const float unit = unit_of(p);
  const int heads = static_cast<int>(p.H / heads_out(p));
  uint32_t block = blockIdx.x;
  const int64_t j0 = take_digit(&block, ceil_div(p.N, kTile)) * kTile;
  const int64_t i0 = take_digit(&block, ceil_div(p.M, kTile)) * kTile;
  const int64_t head_out = take_digit(&block, heads_out(p)), b = block;
  Pairs<QueryRows> sum = {};
  for (int g = 0; g < heads; ++g) {
    const Place at = place(p, b, head_out * heads + g, i0, j0);
    const TileMask mask = mask_tile<QueryRows>(p, at);
    if (mask.empty) continue;
    __syncthreads();
    start_queries<kDim>(p.q, p.D, at, memory.q);
    start_keys<kDim>(p.k, p.D, at, memory.k[0]);
    wait_for_copies();
    __syncthreads();
    Pairs<QueryRows> s;
    sdpa_logits<QueryRows, kType, kDim, kCurved>(p, at, mask, memory.q, memory.k[0], s);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = sum_row(2 * half);
      const int64_t number = query_number(p, at, row);
      const float2 stats =
          row < at.rows ? reinterpret_cast<const float2*>(p.stats)[number] : make_float2(0.f, 0.f);
#pragma unroll
      for (int n = 0; n < QueryRows::kTiles; ++n)
#pragma unroll
        for (int v = 2 * half; v < 2 * half + 2; ++v) {
          const float w = known_weight(s[n][v], stats.x, stats.y, unit);
          s[n][v] = kept(mask.bits, n, v) ? w : 0.f;
        }
    }
    drop(p, surviving_bits<QueryRows>(p, at), s);
    add(s, sum);
  }
  const int rows = extent(p.M, i0), cols = extent(p.N, j0);
  const int64_t offset = offset_of(p.weights, b, head_out, i0, j0);
#pragma unroll
  for (int n = 0; n < QueryRows::kTiles; ++n)
#pragma unroll
    for (int v = 0; v < 4; ++v)
      if (sum_row(v) < rows && sum_col(n, v) < cols)
        store_half<kType>(
            p.weights,
            offset + sum_row(v) * p.weights.stride_r + sum_col(n, v) * p.weights.stride_c,
            sum[n][v] / static_cast<float>(heads));
}

template <DType kType, int kDim, bool kCurved>
void launch(SdpaArgs a, Launcher& launcher) {
  const ForwardParams& p = a.p;
  const size_t shared = sizeof(SdpaMemory<kDim>);
  const int64_t tiles_m = ceil_div(p.M, kTile), tiles_n = ceil_div(p.N, kTile);
  const int64_t blocks = p.B * p.H * tiles_m * a.chunks;
  if (is_few(p)) {
    launcher.run(sdpa_forward_kernel<FewQueryRows, kType, kDim, kCurved>, blocks, kThreads, shared,
                 a);
    merge_partials(p, 0, a.chunks * kWarps, launcher);
  } else {
    if (launch_wgmma(p, launcher)) a.marks = static_cast<const uint32_t*>(p.workspace);
    launcher.run(sdpa_forward_kernel<QueryRows, kType, kDim, kCurved>, blocks_for(a.marks, blocks),
                 kThreads, shared, a);
  }
  if (p.weights_mode == WeightsMode::kNone) return;
  const int64_t heads = min64(p.H, heads_out(p));
  launcher.run(sdpa_weights_kernel<kType, kDim, kCurved>, p.B * heads * tiles_m * tiles_n, kThreads,
               shared, p);
}

// ---- heads over kMostColumns ----

// What is left of a view from a column on.
View from_column(View x, int64_t column) {
  x.data = static_cast<uint16_t*>(x.data) + column * x.stride_c;
  return x;
}

// By products of warpgroups where that path is taken. The kernel for the rest computes all scores
// for each kMostColumns of V. It computes what is marked, and has one dtype for the library's sake.
template <bool kCurved>
void launch_large(SdpaArgs a, Launcher& launcher) {
  constexpr int kDim = 2 * kMostColumns;
  if (launch_wgmma(a.p, launcher)) a.marks = static_cast<const uint32_t*>(a.p.workspace);
  const int64_t blocks = a.p.B * a.p.H * ceil_div(a.p.M, kTile), columns = a.p.E;
  const View v = a.p.v, out = a.p.out;
  for (int64_t first = 0; first < max64(columns, 1); first += kMostColumns) {
    a.p.v = from_column(v, first), a.p.out = from_column(out, first);
    a.p.E = min64(columns - first, kMostColumns);
    launcher.run(sdpa_forward_kernel<QueryRows, kAnyHalf, kDim, kCurved>,
                 blocks_for(a.marks, blocks), kThreads, sizeof(SdpaMemory<kDim>), a);
  }
}

}  // namespace

int64_t sdpa_forward_workspace_bytes(const ForwardParams& p) {
  if (is_few(p)) return 4 * partial_floats(p, plan(p).chunks * kWarps);
  return wgmma_forward_bytes(p);
}

const char* sdpa_forward(const ForwardParams& p, void* stream) {
  Launcher launcher(stream);
  if (max64(p.D, p.E) > kMostColumns) {
    if (const char* reason = against_large_heads(p)) return reason;
    is_curved(p) ? launch_large<true>(plan(p), launcher) : launch_large<false>(plan(p), launcher);
    return launcher.error();
  }
  with_operands(
      p, [&](auto type, auto dim, auto curved) { launch<type, dim, curved>(plan(p), launcher); });
  return launcher.error();
}

}  // namespace fastattn::cuda
