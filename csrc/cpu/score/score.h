// What a score is to the attention loops: cpu/loop/forward.h and cpu/loop/backward.h are written
// once, over this concept, and instantiated for DotScore (dot.h) and AdditiveScore
// (additive/score.h).
//
//   struct Score {
//     // The tile: queries x keys; kBlockN is a multiple of kWidth.
//     static constexpr int64_t kBlockM, kBlockN;
//
//     // Takes its scratch memory, once a thread. `backward`: gradients will be asked for.
//     Score(const AttentionParams& p, const Path& path, Scratch& scratch, bool backward);
//
//     // Convert, scale and lay out a block of keys, of queries; either may be reloaded without the
//     // other. load_queries also selects query head h: its weights, for the additive score.
//     void load_keys(int64_t b, int64_t hkv, int64_t j0, int64_t cols);    // cols <= kBlockN
//     void load_queries(int64_t b, int64_t h, int64_t i0, int64_t rows);   // rows <= kBlockM
//
//     // logit_scale() * s[i * kBlockN + j] = log2(e) * score(i0 + i, j0 + j), for i < rows and
//     // j < cols rounded up to kWidth; what is written past cols is ignored: the loop overwrites
//     // it with -inf. A NaN in key j may reach column j only, one in query i row i only.
//     void scores(float* s);
//
//     // ds has the layout of s and holds d loss / d score in natural units, exactly 0 at masked
//     // pairs and in all padding up to (rows, cols rounded up to kWidth). Adds to grad_q
//     // (row-major [rows, grad_q_stride], natural units), to the tile's own key gradient and, for
//     // scores that have weights, to grad_w [D]. `masked`: some pairs are masked, so that 0 * NaN
//     // must count as 0 and garbage behind the mask stays there.
//     void clear_key_grad();
//     void backward(const float* ds, bool masked, float* grad_q, int64_t grad_q_stride,
//                   float* grad_w);
//     void store_key_grad(const View& grad_k, int64_t b, int64_t hkv, int64_t j0);
//
//     // Optional: what scores() leaves for the softmax to multiply, where it costs nothing; at
//     // least 0.
//     float logit_scale() const;
//
//     // Optional: lets what follows concern the first `cols` of the keys loaded, a whole number of
//     // vectors or all; until load_keys().
//     void use_keys(int64_t cols);
//
//     // Optional: a constructor with a fifth argument, int64_t slots, use_slot(slot) and a static
//     // query_bytes(p), the memory of a query in a slot. Several blocks of queries then stay
//     // loaded, load_queries() and scores() concern the current slot, at first 0, and the forward
//     // pass takes them all through each block of keys.
//   };
#pragma once

#include "cpu/base/path.h"
#include "cpu/tile/masking.h"

namespace fastattn::FASTATTN_ISA {

// Where W and dS of a tile go: in place of S and dP.
struct GradsInPlace {
  static constexpr int kRows = 1, kVectors = 1;
  static constexpr int64_t kStep = 1, kWhole = 1;
  float *w, *ds;  // [rows, ld]
  int64_t ld, row = 0;
  FASTATTN_MEMBER void begin(int64_t i) { row = i * ld; }
  FASTATTN_MEMBER void put(int64_t c, const Vec (&w_c)[1][1], const Vec (&ds_c)[1][1]) const {
    store(w + row + c, w_c[0][0]);
    store(ds + row + c, ds_c[0][0]);
  }
  FASTATTN_MEMBER void end() const {}
};

// What W, dP and dS are multiplied by: powers of 2.
struct GradUnits {
  float w, dp, ds;
};

template <typename Score>
FASTATTN_SIMD auto logit_scale_of(const Score& score, int) -> decltype(score.logit_scale()) {
  return score.logit_scale();
}
template <typename Score>
FASTATTN_SIMD float logit_scale_of(const Score&, long) {
  return 1.f;
}
template <typename Score>
FASTATTN_SIMD float logit_scale(const Score& score) {
  return logit_scale_of(score, 0);
}

// Called before the scores of a tile are computed: a score with several ways to do that, all
// accurate, may have to know which pairs matter.
template <typename Score>
FASTATTN_SIMD void choose_form(Score&, const MaskTile&) {}

// Whether what holds a block of keys can do with fewer than are loaded.
template <typename T, typename = void>
struct CanNarrow : std::false_type {};
template <typename T>
struct CanNarrow<T, std::void_t<decltype(std::declval<T&>().use_keys(0))>> : std::true_type {};

}  // namespace fastattn::FASTATTN_ISA
