// The instructions of AVX-512 that csrc/cpu names, in C++, for a processor with AVX2. `make
// test-isas` includes this file before each source and compiles all sets from AVX-512 on without
// AVX-512: the compiler splits their vectors, and these functions hide its intrinsics.
//
// Intel, "64 and IA-32 Architectures Software Developer's Manual", volume 2. Masked lanes are 0.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define FASTATTN_IN_SOFTWARE 1

// 1 for the set avx512, 2 for those that also have AVX512-BF16.
#define FASTATTN_LEVEL_OF_avx512 1
#define FASTATTN_LEVEL_OF_avx512_bf16 2
#define FASTATTN_LEVEL_OF_amx 2
#define FASTATTN_LEVEL_OF_amx_fp16 2
#define FASTATTN_JOINED(a, b) a##b
#define FASTATTN_LEVEL_OF(set) FASTATTN_JOINED(FASTATTN_LEVEL_OF_, set)

#if FASTATTN_LEVEL_OF(FASTATTN_ISA) >= 1
#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512DQ__ 1
#define __AVX512VL__ 1
#endif
#if FASTATTN_LEVEL_OF(FASTATTN_ISA) >= 2
#define __AVX512BF16__ 1
#endif

#ifdef __AVX512F__
// Instead of those of csrc/cpu/base/simd.h: a shuffle takes an instruction a lane, so that code
// would be ten times as long if everything were inlined.
#define FASTATTN_SIMD static inline __attribute__((unused))
#define FASTATTN_MEMBER inline

namespace fastattn::FASTATTN_ISA {

typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));

// ---- halves of a vector ----

template <typename Half, typename T>
FASTATTN_SIMD Half half_of(const T& x, int n) {
  static_assert(sizeof(T) == 2 * sizeof(Half));
  Half out;
  std::memcpy(&out, reinterpret_cast<const char*>(&x) + n * sizeof(Half), sizeof(Half));
  return out;
}
template <typename T, typename Half>
FASTATTN_SIMD T joined(const Half& low, const Half& high) {
  static_assert(sizeof(T) == 2 * sizeof(Half));
  T out;
  std::memcpy(&out, &low, sizeof(Half));
  std::memcpy(reinterpret_cast<char*>(&out) + sizeof(Half), &high, sizeof(Half));
  return out;
}
#define FASTATTN_LOW(Half, x) half_of<Half>(x, 0)
#define FASTATTN_HIGH(Half, x) half_of<Half>(x, 1)

// ---- masks ----

// Of lanes that are 0 or -1.
FASTATTN_SIMD __mmask16 mask_of(const Ints& lanes) {
  const int low = _mm256_movemask_ps(FASTATTN_LOW(__m256, lanes));
  return static_cast<__mmask16>(low | _mm256_movemask_ps(FASTATTN_HIGH(__m256, lanes)) << 8);
}
template <typename T>
FASTATTN_SIMD T kept(__mmask16 mask, T x) {
  if (mask == 0xffff) return x;
  Ints lanes;
  for (int n = 0; n < 16; ++n) lanes[n] = mask >> n & 1 ? -1 : 0;
  return (T)((Ints)x & lanes);
}
// Reads no lane that the mask leaves out.
template <typename T, typename Lane>
FASTATTN_SIMD T kept_lanes(__mmask16 mask, const Lane* from) {
  Lane out[16] = {};
  for (int n = 0; n < 16; ++n)
    if (mask >> n & 1) out[n] = from[n];
  static_assert(sizeof(T) == sizeof(out));
  T vector;
  std::memcpy(&vector, out, sizeof(out));
  return vector;
}

FASTATTN_SIMD __mmask16 _mm512_test_epi32_mask(__m512i a, __m512i b) {
  return mask_of(((Ints)a & (Ints)b) != 0);
}
FASTATTN_SIMD __mmask16 _mm512_cmpgt_epi32_mask(__m512i a, __m512i b) {
  return mask_of((Ints)a > (Ints)b);
}
// Of a > b (_CMP_GT_OQ), or else of not a < b (_CMP_NLT_UQ).
FASTATTN_SIMD __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int predicate) {
  return mask_of(predicate == _CMP_GT_OQ ? (Ints)(a > b) : ~(Ints)(a < b));
}

// ---- arithmetic ----

FASTATTN_SIMD __m512i _mm512_set1_epi32(int x) { return (__m512i)(x - Ints{}); }

FASTATTN_SIMD __m512 _mm512_maskz_max_ps(__mmask16 mask, __m512 a, __m512 b) {
  return kept(mask, a > b ? a : b);
}
FASTATTN_SIMD __m512 _mm512_maskz_min_ps(__mmask16 mask, __m512 a, __m512 b) {
  return kept(mask, a < b ? a : b);
}
FASTATTN_SIMD __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  return joined<__m512>(
      _mm256_fmadd_ps(FASTATTN_LOW(__m256, a), FASTATTN_LOW(__m256, b), FASTATTN_LOW(__m256, c)),
      _mm256_fmadd_ps(FASTATTN_HIGH(__m256, a), FASTATTN_HIGH(__m256, b),
                      FASTATTN_HIGH(__m256, c)));
}
FASTATTN_SIMD __m512 floors(__m512 x) {
  return joined<__m512>(_mm256_floor_ps(FASTATTN_LOW(__m256, x)),
                        _mm256_floor_ps(FASTATTN_HIGH(__m256, x)));
}
// An estimate of 1 / x to 14 bits, the rest of which is noise to callers: these are cut off.
FASTATTN_SIMD __m512 _mm512_maskz_rcp14_ps(__mmask16 mask, __m512 x) {
  return kept(mask, (__m512)((Ints)(1.f / x) & ~0x1ff));
}
// x less the whole number below: 0 of an infinity.
FASTATTN_SIMD __m512 _mm512_maskz_reduce_ps(__mmask16 mask, __m512 x, int toward) {
  static_cast<void>(toward);  // _MM_FROUND_TO_NEG_INF
  const Ints infinite = ((Ints)x & 0x7fffffff) == 0x7f800000;
  return kept(mask, (__m512)((Ints)(x - floors(x)) & ~infinite));
}
// x 2^floor(n), rounded once: the first of two powers is exact.
FASTATTN_SIMD __m512 _mm512_maskz_scalef_ps(__mmask16 mask, __m512 x, __m512 n) {
  const __m512 least = -252.f - __m512{}, most = 252.f - __m512{}, whole = floors(n);
  const __m512 within = whole < least ? least : whole > most ? most : whole;
  const __m512 first = floors(within * 0.5f);
  const auto power = [](__m512 k) __attribute__((always_inline)) {
    return (__m512)((__builtin_convertvector(k, Ints) + 127) << 23);
  };
  return kept(mask, n != n ? n : x * power(first) * power(within - first));
}
// Denormals are 0 before and after each sum, whatever the modes of the thread are.
FASTATTN_SIMD __m512 flushed(__m512 x) {
  const Words bits = (Words)x;
  return (__m512)((bits & 0x7f800000u) == 0 ? bits & 0x80000000u : bits);
}
// Adds the products of the second numbers of each pair, then those of the first.
FASTATTN_SIMD __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
  const Words x = (Words)a, y = (Words)b;
  const auto add = [&](Words left, Words right) __attribute__((always_inline)) {
    sum = flushed(_mm512_fmadd_ps(flushed((__m512)left), flushed((__m512)right), flushed(sum)));
  };
  add(x & 0xffff0000u, y & 0xffff0000u);
  add(x << 16, y << 16);
  return sum;
}

// ---- movement and conversion ----

FASTATTN_SIMD __m512i _mm512_ternarylogic_epi32(__m512i a, __m512i b, __m512i c, int table) {
  Ints out{};
  for (int n = 0; n < 8; ++n)
    if (table >> n & 1)
      out |= (n & 4 ? (Ints)a : ~(Ints)a) & (n & 2 ? (Ints)b : ~(Ints)b) &
             (n & 1 ? (Ints)c : ~(Ints)c);
  return (__m512i)out;
}
FASTATTN_SIMD __m512 _mm512_permutex2var_ps(__m512 a, __m512i lanes, __m512 b) {
  __m512 out;
  for (int n = 0; n < 16; ++n) {
    const int lane = ((Ints)lanes)[n] & 31;
    out[n] = lane < 16 ? a[lane] : b[lane - 16];
  }
  return out;
}
FASTATTN_SIMD __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const void* from) {
  return kept_lanes<__m512>(mask, static_cast<const float*>(from));
}
FASTATTN_SIMD __m256i _mm256_maskz_loadu_epi16(__mmask16 mask, const void* from) {
  return kept_lanes<__m256i>(mask, static_cast<const uint16_t*>(from));
}
FASTATTN_SIMD __m512i _mm512_maskz_cvtepi8_epi32(__mmask16 mask, __m128i x) {
  return kept(mask, joined<__m512i>(_mm256_cvtepi8_epi32(x),
                                    _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(x, x))));
}
FASTATTN_SIMD __m512i _mm512_maskz_cvtepu16_epi32(__mmask16 mask, __m256i x) {
  return kept(mask, joined<__m512i>(_mm256_cvtepu16_epi32(FASTATTN_LOW(__m128i, x)),
                                    _mm256_cvtepu16_epi32(FASTATTN_HIGH(__m128i, x))));
}
FASTATTN_SIMD __m512 _mm512_maskz_cvtph_ps(__mmask16 mask, __m256i x) {
  return kept(mask, joined<__m512>(_mm256_cvtph_ps(FASTATTN_LOW(__m128i, x)),
                                   _mm256_cvtph_ps(FASTATTN_HIGH(__m128i, x))));
}
FASTATTN_SIMD __m256i _mm512_maskz_cvtps_ph(__mmask16 mask, __m512 x, int rounding) {
  static_cast<void>(rounding);  // to nearest
  const __m512 all = kept(mask, x);
  return joined<__m256i>(_mm256_cvtps_ph(FASTATTN_LOW(__m256, all), _MM_FROUND_TO_NEAREST_INT),
                         _mm256_cvtps_ph(FASTATTN_HIGH(__m256, all), _MM_FROUND_TO_NEAREST_INT));
}

}  // namespace fastattn::FASTATTN_ISA
#endif
