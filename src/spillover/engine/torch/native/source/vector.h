// Sixteen float32 lanes and what the kernels do with them.
//
// Written with the vector extensions of GCC and Clang: one AVX-512 register, two of AVX2, four of NEON. Every
// function gives the same bits for a lane whatever the other lanes hold.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace spill {

constexpr int LANES = 16;
constexpr int PANEL = 2 * LANES;  // outputs that a kernel computes side by side

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));

template <class V, class P>
inline V load(const P* from) {
  V value;
  std::memcpy(&value, from, sizeof(V));
  return value;
}

template <class V, class P>
inline void store(P* to, V value) {
  std::memcpy(to, &value, sizeof(V));
}

inline f32x16 splat(float x) { return f32x16{} + x; }

inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return a * b + c;
#endif
}

inline f32x16 maximum(f32x16 a, f32x16 b) { return a > b ? a : b; }

template <class Join>
inline float across(f32x16 x, Join join) {
  float lanes[LANES];
  store(lanes, x);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] = join(lanes[i], lanes[i + width]);
  return lanes[0];
}

inline float sum(f32x16 x) {
  return across(x, [](float a, float b) { return a + b; });
}

inline float largest(f32x16 x) {
  return across(x, [](float a, float b) { return a > b ? a : b; });
}

// e^x within 2 ulp; exactly 0 below -87.3, where masked scores lie, and the largest finite power above 88.3.
// Range reduction by ln 2 in two parts (Cody and Waite), then the Taylor polynomial of degree 7.
inline f32x16 exp(f32x16 x) {
#if defined(__AVX512F__)
  // the operand that may not be a number comes second: it is what these return then
  const __m512 bound = _mm512_min_ps(_mm512_set1_ps(88.3f), _mm512_max_ps(_mm512_set1_ps(-200.0f), (__m512)x));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(bound, _mm512_set1_ps(1.44269504088896341f)), 8);
  f32x16 r = fma((f32x16)n, splat(-0.693359375f), (f32x16)bound);
  r = fma((f32x16)n, splat(2.12194440e-4f), r);
  f32x16 p = splat(1.0f / 5040);
  for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = fma(p, r, splat(c));
  return (f32x16)_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.3f), _CMP_NLT_UQ), (__m512)p, n);
#else
  const i32x16 tiny = x < -87.3f;
  x = x < -87.3f ? splat(-87.3f) : x;
  x = x > 88.3f ? splat(88.3f) : x;
  const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const f32x16 rounded = fma(x, splat(1.44269504088896341f), splat(shift));
  const f32x16 n = rounded - shift;
  f32x16 r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  f32x16 p = splat(1.0f / 5040);
  for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = fma(p, r, splat(c));
  const i32x16 power = ((i32x16)rounded - 0x4B400000 + 127) << 23;
  p *= (f32x16)power;
  return tiny ? f32x16{} : p;
#endif
}

inline f32x16 tanh(f32x16 x) { return 1.0f - 2.0f / (exp(2.0f * x) + 1.0f); }

// bfloat16, rounded to nearest even, in the low half of each lane.
inline u32x16 narrow(f32x16 x) {
  const u32x16 bits = (u32x16)x;
  return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}

inline void narrow(const float* from, uint16_t* to) {  // 16 of them
  typedef uint16_t u16x16 __attribute__((vector_size(32)));
  store(to, __builtin_convertvector(narrow(load<f32x16>(from)), u16x16));
}

inline uint16_t narrow(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

inline float widen(uint16_t x) {
  const uint32_t bits = uint32_t(x) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace spill
