// Half precision, and dtypes in general. Arithmetic is always fp32, so these are only loads and
// stores.
#pragma once

#include "cpu/base/simd.h"

namespace fastattn::FASTATTN_ISA {

// Zero-extends. Written out where compilers generate slow code.
FASTATTN_SIMD VecU widen(VecHalf x) {
#if defined(__AVX512F__) && FASTATTN_VECTOR_WIDTH == 16
  return (VecU)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)x);
#elif defined(__AVX2__) && FASTATTN_VECTOR_WIDTH == 8
  return (VecU)_mm256_cvtepu16_epi32((__m128i)x);
#else
  return __builtin_convertvector(x, VecU);
#endif
}

FASTATTN_SIMD Vec bf16_to_float(VecHalf x) { return (Vec)(widen(x) << 16); }

// Round to nearest even; NaN keeps its sign and becomes quiet.
FASTATTN_SIMD VecHalf float_to_bf16(Vec x) {
  const VecU bits = (VecU)x;
  const VecU rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const VecU nan = (bits >> 16) | 0x40u;
  return __builtin_convertvector(x == x ? rounded : nan, VecHalf);
}

FASTATTN_SIMD Vec fp16_to_float(VecHalf x) {
#if defined(__AVX512F__) && FASTATTN_VECTOR_WIDTH == 16
  return (Vec)_mm512_maskz_cvtph_ps(0xffff, (__m256i)x);
#elif defined(__F16C__) && FASTATTN_VECTOR_WIDTH == 8
  return (Vec)_mm256_cvtph_ps((__m128i)x);
#else
  // Shift exponent and mantissa into place, then multiply by 2^112, which also makes denormals
  // right.
  const VecU wide = widen(x);
  const VecU sign = (wide & 0x8000u) << 16;
  const VecU magnitude = (wide & 0x7fffu) << 13;
  const VecU finite = (VecU)((Vec)magnitude * splat(0x1p112f));
  const VecU special = magnitude | 0x7f800000u;  // inf and NaN
  return (Vec)(((wide & 0x7c00u) == 0x7c00u ? special : finite) | sign);
#endif
}

FASTATTN_SIMD VecHalf float_to_fp16(Vec x) {
#if defined(__AVX512F__) && FASTATTN_VECTOR_WIDTH == 16
  return (VecHalf)_mm512_maskz_cvtps_ph(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__) && FASTATTN_VECTOR_WIDTH == 8
  return (VecHalf)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#else
  const VecU bits = (VecU)x;
  const VecU sign = (bits >> 16) & 0x8000u;
  const Vec magnitude = abs(x);
  const VecU mag_bits = (VecU)magnitude;
  // Normal results: rebias the exponent, and round off 13 bits to nearest even.
  const VecU normal = (mag_bits - 0x38000000u + 0xfffu + ((mag_bits >> 13) & 1u)) >> 13;
  // Below 2^-14: adding 2^-1 aligns the mantissa so that the hardware rounds it.
  const VecU denormal = (VecU)(magnitude + splat(0.5f)) - 0x3f000000u;
  const VecU finite = magnitude < splat(0x1p-14f) ? denormal : normal;
  const VecU overflow = splat_u(0x7c00u);
  const VecU in_range = magnitude >= splat(65520.f) ? overflow : finite;
  return __builtin_convertvector((x == x ? in_range : splat_u(0x7e00u)) | sign, VecHalf);
#endif
}

// Loads kWidth elements of any supported dtype as floats; stores likewise.
template <DType kType>
FASTATTN_SIMD Vec load_as(const void* base, int64_t offset) {
  if constexpr (kType == DType::kFloat32) {
    return load(static_cast<const float*>(base) + offset);
  } else {
    const VecHalf half = load_lanes<VecHalf>(static_cast<const uint16_t*>(base) + offset);
    return kType == DType::kBFloat16 ? bf16_to_float(half) : fp16_to_float(half);
  }
}
template <DType kType>
FASTATTN_SIMD void store_as(void* base, int64_t offset, Vec x) {
  if constexpr (kType == DType::kFloat32) {
    store(static_cast<float*>(base) + offset, x);
  } else {
    const VecHalf half = kType == DType::kBFloat16 ? float_to_bf16(x) : float_to_fp16(x);
    std::memcpy(static_cast<uint16_t*>(base) + offset, &half, sizeof(half));
  }
}

// One element, through a vector so that the conversion is written once.
template <DType kType>
FASTATTN_SIMD float load_one(const void* base, int64_t offset) {
  if constexpr (kType == DType::kFloat32) {
    return static_cast<const float*>(base)[offset];
  } else {
    VecHalf half{};
    half[0] = static_cast<const uint16_t*>(base)[offset];
    return (kType == DType::kBFloat16 ? bf16_to_float(half) : fp16_to_float(half))[0];
  }
}

// Calls f with the dtype as a compile-time constant.
template <typename F>
FASTATTN_SIMD void with_dtype(DType dtype, F f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(std::integral_constant<DType, DType::kFloat32>{});
    case DType::kBFloat16:
      return f(std::integral_constant<DType, DType::kBFloat16>{});
    case DType::kFloat16:
      return f(std::integral_constant<DType, DType::kFloat16>{});
  }
}

}  // namespace fastattn::FASTATTN_ISA
