// What a score is to the attention loops. cpu/loop/forward.h and cpu/loop/backward.h are written
// once, over this concept. DotScore (dot.h), AdditiveScore (additive/score.h) and GaussianScore
// (gaussian.h) are scores.
//
//   struct Score {
//     // The tile, queries x keys: m and n, a multiple of kWidth. FixedTile is one that never
//     // varies, known to the compiler.
//     using Tile = TileSize;
//     static Tile tile(const Path& path);
//
//     // Takes its scratch memory, once a thread. `backward`: gradients will follow.
//     Score(const AttentionParams& p, const Path& path, Scratch& scratch, bool backward,
//           int64_t slots = 1);
//
//     // Convert, scale and lay out a block of keys or queries. Either may be reloaded alone.
//     // load_queries also selects query head h: its weights, for the additive score.
//     void load_keys(int64_t b, int64_t hkv, int64_t j0, int64_t cols);    // cols <= n
//     void load_queries(int64_t b, int64_t h, int64_t i0, int64_t rows);   // rows <= m
//
//     // scale(p) * s[i * n + j] / own_factor(p) = score(i0 + i, j0 + j), for i < rows and
//     // j < cols rounded up to kWidth. The loop overwrites what is past cols with -inf.
//     // A NaN in key j may reach column j only, one in query i row i only.
//     void scores(float* s);
//
//     // ds has the layout of s and holds d loss / d score in natural units. It is exactly 0 at
//     // masked pairs and in the padding up to (rows, cols rounded up to kWidth). Adds to grad_q
//     // (row-major [rows, grad_q_stride], natural units), to the tile's own key gradient and, for
//     // scores with weights, to grad_w [D]. At masked pairs, 0 * NaN must count as 0.
//     // store_key_grad() loses the keys.
//     void clear_key_grad();
//     void backward(const float* ds, const MaskTile& mask, float* grad_q, int64_t grad_q_stride,
//                   double* grad_w);
//     void store_key_grad(const View& grad_k, int64_t b, int64_t hkv, int64_t j0);
//
//     // The rest is optional: ScoreDefaults is the score that needs none of it.
//
//     // scale() is of the score, the same for every kernel and at least 0. own_factor() is of this
//     // kernel, a power of 2.
//     static double scale(const AttentionParams& p);
//     static float own_factor(const AttentionParams& p);
//
//     // The first key of a tile is a multiple of this. n: a score of one key depends on the
//     // others of its tile, by rounding, and every pass must have the same tiles.
//     static constexpr int64_t kBeginStep = kWidth;
//
//     // A dim of a pair takes as long as so many multiply-adds.
//     static constexpr int64_t kDimWork = 1;
//
//     // Called before the scores of a tile are computed. A score with several accurate ways
//     // to compute them may have to know which pairs matter. Returns whether the tile needs the
//     // wide form. use_form() follows, with true if score or values need the wide form.
//     // has_forms(): whether there are two.
//     static bool has_forms(const AttentionParams& p);
//     bool look_at(const MaskTile& mask);
//     void use_form(bool wide);
//
//     // Restricts what follows to the first `cols` of the loaded keys, whole vectors or all,
//     // until load_keys().
//     static constexpr bool kCanNarrow = true;
//     void use_keys(int64_t cols);
//
//     // The constructor says how many blocks of queries stay loaded; Way::kOneQuery has one.
//     // load_queries() and scores() use the current slot, at first 0. The forward pass takes all
//     // slots through each block of keys. query_bytes(): the memory of a query in a slot.
//     void use_slot(int64_t slot);
//     static int64_t query_bytes(const AttentionParams& p);
//
//     // scores() of the columns that strips of rows keep (MaskTile::sparse()), and no others.
//     static constexpr bool kHasStrips = true;
//     void scores_of(const Strips& strips, float* s);
//   };
//
// Values of the forward pass. O has rows of stride() floats.
//
//   struct Values {
//     Values(const AttentionParams& p, const Path& path, Scratch& scratch, int64_t block_m,
//            int64_t block_n);
//     int64_t stride() const;
//     void load(int64_t b, int64_t hkv, int64_t j0, int64_t cols);
//
//     // The factors of weights and their sums, and of outputs: powers of 2.
//     float weight_unit() const, output_unit() const;
//
//     // A step of the online softmax (softmax_step()): scores s become weights, in the place
//     // where accumulate() reads them.
//     void weigh(const MaskTile& mask, const DropoutParams& dropout, const TilePlace& at,
//                const RowState& state, LinearLogit logit, float* s, int64_t ld, float* drop);
//     // o[i] = alpha[i] * o[i] + sum_j w_ij V[j]. If the mask is sparse, only its strips are
//     // filled.
//     void accumulate(float* s, int64_t ld, int64_t rows, const float* alpha,
//                     const MaskTile& mask, float* o);
//
//     // Optional, as for a score: look_at(), use_form(), use_keys() (FormDefaults).
//   };
//
// Values of the backward pass, and the gradients of a block of outputs.
//
//   struct Grads {
//     Grads(const BackwardParams& p, const View& grad_out, Scratch& scratch, int64_t block_m,
//           int64_t block_n);
//     // load_values() clears dV.
//     void load_values(int64_t b, int64_t hkv, int64_t j0, int64_t cols);
//     void load_grad_out(int64_t b, int64_t h, int64_t i0, int64_t rows);
//
//     void grad_weights(const MaskTile& mask, float* dp);         // dP = dO V^T
//     void accumulate(float* weights, const MaskTile& mask);      // dV += W^T dO
//     void store(const View& grad_v, int64_t b, int64_t hkv, int64_t j0);
//
//     // Optional, as above, and (GradDefaults): calls fill(sink, units), which puts W and dS
//     // into a sink in those units, for accumulate() and the score's backward().
//     template <typename Score, typename Fill>
//     void make_grads(Score& score, Fill fill, GradsInPlace in_place);
//   };
#pragma once

#include "cpu/base/path.h"
#include "cpu/tile/masking.h"

namespace fastattn::FASTATTN_ISA {

// A score with one form, for all loaded keys.
struct FormDefaults {
  static bool look_at(const MaskTile&) { return false; }
  static void use_form(bool) {}
  static void use_keys(int64_t) {}
};

// -1, 0 or 1.
constexpr float sign_of(float x) { return x == 0.f ? x : __builtin_copysignf(1.f, x); }

struct ScoreDefaults : FormDefaults {
  static double scale(const AttentionParams&) { return 0.6931471805599453; }  // ln 2
  static float own_factor(const AttentionParams&) { return 1.f; }
  static bool has_forms(const AttentionParams&) { return false; }

  static constexpr int64_t kBeginStep = kWidth, kDimWork = 1;
  static constexpr bool kCanNarrow = false, kHasStrips = false;
  static void use_slot(int64_t) {}
  static int64_t query_bytes(const AttentionParams&) { return 0; }
};

template <int64_t kM, int64_t kN>
struct FixedTile : ScoreDefaults {
  static constexpr int64_t kBlockM = kM, kBlockN = kN;
  struct Tile {
    static constexpr int64_t m = kM, n = kN;
  };
  static Tile tile(const Path&) { return {}; }
};

// A tile of scores, or of what a curve makes of them, in rows of `ld`: see curve_scores().
template <typename Score>
FASTATTN_SIMD void scores_of(Score& score, const LogitUnits& units, const MaskTile& mask,
                             int64_t rows, int64_t cols, float* s, int64_t ld,
                             float* slopes = nullptr) {
  if constexpr (Score::kHasStrips)
    mask.sparse() ? score.scores_of(mask.strips(), s) : score.scores(s);
  else
    score.scores(s);
  curve_scores(units, rows, cols, ld, s, slopes);
}

// Picks one form for score and values.
template <typename Score, typename Values>
FASTATTN_SIMD void choose_form(Score& score, Values& values, const MaskTile& mask) {
  const bool wide = score.look_at(mask) || values.look_at(mask);
  score.use_form(wide);
  values.use_form(wide);
}

// Where W and dS of a tile go: in place of S and dP.
struct GradsInPlace {
  static constexpr int kRows = 1, kVectors = 1;
  static constexpr int64_t kStep = 1, kWhole = 1;
  static constexpr Takes kTakes = Takes::kListed;
  float *w, *ds;  // [rows, ld]
  int64_t ld;
  FASTATTN_MEMBER GradsInPlace row(int64_t i) const { return {w + i * ld, ds + i * ld, ld}; }
  FASTATTN_MEMBER void put(int64_t c, const Vec (&w_c)[1][1], const Vec (&ds_c)[1][1]) const {
    store(w + c, w_c[0][0]);
    store(ds + c, ds_c[0][0]);
  }
  FASTATTN_MEMBER void end(const GradsInPlace&) const {}
};

// The factors of W, dP and dS: powers of 2.
struct GradUnits {
  float w, dp, ds;
};

struct GradDefaults : FormDefaults {
  // Whether grad_weights() sums as dot_rows() does, and not as gemm().
  static constexpr bool kSumsByRow = false;

  template <typename Score, typename Fill>
  static void make_grads(Score&, Fill fill, GradsInPlace in_place) {
    fill(in_place, GradUnits{1.f, 1.f, 1.f});
  }
};

}  // namespace fastattn::FASTATTN_ISA
