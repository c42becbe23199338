// Norm, rotation and gate of a training pass and their gradients: each reads its tensors once.
//
// Tensors hold T's elements; what is computed in between is float32 and rounded once.
#pragma once

#include <cmath>

#include "crew.h"
#include "kernels.h"

namespace spill {

// Sixteen elements as floats, and back.
inline f32x16 lanes(const float* from) { return load<f32x16>(from); }
inline f32x16 lanes(const uint16_t* from) {
  typedef uint16_t u16x16 __attribute__((vector_size(32)));
  return (f32x16)(__builtin_convertvector(load<u16x16>(from), u32x16) << 16);
}
inline void put_lanes(float* to, f32x16 value) { store(to, value); }
inline void put_lanes(uint16_t* to, f32x16 value) {
#if defined(__AVX512BF16__)
  store(to, _mm512_cvtneps_pbh((__m512)value));
#else
  typedef uint16_t u16x16 __attribute__((vector_size(32)));
  store(to, __builtin_convertvector(narrow(value), u16x16));
#endif
}

// The same of fewer, the other lanes zero.
template <class E>
inline f32x16 lanes(const E* from, int64_t count) {
  if (count >= LANES) return lanes(from);
  E some[LANES] = {};
  std::memcpy(some, from, count * sizeof(E));
  return lanes(some);
}
template <class E>
inline void put_lanes(E* to, f32x16 value, int64_t count) {
  if (count >= LANES) return put_lanes(to, value);
  E some[LANES];
  put_lanes(some, value);
  std::memcpy(to, some, count * sizeof(E));
}

// out = x / sqrt(mean(x^2) + eps) * weight; `scales` gets the factor of each row.
template <class T>
void rms_norm(const Crew& crew, const typename T::element* x, const float* weight, int64_t rows, int64_t n, float eps,
              typename T::element* out, float* scales) {
  crew.each(rows, [&](int64_t row) {
    const auto* from = x + row * n;
    f32x16 squares{};
    for (int64_t i = 0; i < n; i += LANES) {
      const f32x16 v = lanes(from + i, n - i);
      squares = fma(v, v, squares);
    }
    const float scale = 1.0f / std::sqrt(sum(squares) / float(n) + eps);
    for (int64_t i = 0; i < n; i += LANES)
      put_lanes(out + row * n + i, lanes(from + i, n - i) * scale * lanes(weight + i, n - i), n - i);
    scales[row] = scale;
  });
}

// by_x = s g w - x s^3 mean(g w x), s the row's scale.
template <class T>
void rms_norm_back(const Crew& crew, const typename T::element* grad, const typename T::element* x, const float* weight,
                   const float* scales, int64_t rows, int64_t n, typename T::element* by_x) {
  crew.each(rows, [&](int64_t row) {
    const auto *g = grad + row * n, *v = x + row * n;
    const float scale = scales[row];
    f32x16 total{};
    for (int64_t i = 0; i < n; i += LANES)
      total = fma(lanes(g + i, n - i) * lanes(weight + i, n - i), lanes(v + i, n - i), total);
    const float shared = sum(total) / float(n) * scale * scale * scale;
    for (int64_t i = 0; i < n; i += LANES) {
      const f32x16 direct = lanes(g + i, n - i) * lanes(weight + i, n - i) * scale;
      put_lanes(by_x + row * n + i, direct - lanes(v + i, n - i) * shared, n - i);
    }
  });
}

struct Turn {
  int32_t heads, turned, dim, rotated;  // heads of `dim`; the first `turned` of them turn in their first `rotated`
  float direction;                      // 1: forward, -1: back
};

// Each token's heads, rotated: x cos + swapped x sin, the halves of `sin` of opposite signs.
template <class T>
void rotate(const Crew& crew, const typename T::element* x, const typename T::element* cos,
            const typename T::element* sin, int64_t tokens, const Turn& how, typename T::element* out) {
  const int64_t row = int64_t(how.heads) * how.dim, half = how.rotated / 2;
  crew.each(tokens, [&](int64_t token) {
    const auto *c = cos + token * how.rotated, *s = sin + token * how.rotated;
    std::memcpy(out + token * row, x + token * row, row * sizeof *x);
    for (int head = 0; head < how.turned; head++) {
      const auto* from = x + token * row + head * how.dim;
      auto* to = out + token * row + head * how.dim;
      for (int64_t i = 0; i < half; i += LANES) {
        const int64_t some = half - i;
        const f32x16 low = lanes(from + i, some), high = lanes(from + half + i, some);
        const f32x16 first = how.direction * lanes(s + i, some), second = how.direction * lanes(s + half + i, some);
        put_lanes(to + i, low * lanes(c + i, some) + high * first, some);
        put_lanes(to + half + i, high * lanes(c + half + i, some) + low * second, some);
      }
    }
  });
}

struct Active {
  f32x16 value, slope;
};

// 1 / x for what is neither tiny nor huge: an estimate and one step of Newton's, half the time of a division.
inline f32x16 inverse(f32x16 x) {
#if defined(__AVX512F__)
  const f32x16 guess = (f32x16)_mm512_rcp14_ps((__m512)x);
  return guess * fma(-x, guess, splat(2.0f));
#else
  return 1.0f / x;
#endif
}

inline Active silu(f32x16 x) {
  const f32x16 s = inverse(1.0f + exp(-x));
  return {x * s, s * (1.0f + x * (1.0f - s))};
}

// GELU by tanh (Hendrycks and Gimpel, arXiv 1606.08415); (1 + tanh(u)) / 2 is the sigmoid of 2 u, which loses no
// digits where it is small.
inline Active gelu(f32x16 x) {
  const f32x16 square = x * x;
  const f32x16 s = inverse(1.0f + exp(-1.5957691216f * x * (1.0f + 0.044715f * square)));
  const f32x16 inner = 1.5957691216f * (1.0f + 3 * 0.044715f * square);
  return {x * s, s + x * s * (1.0f - s) * inner};
}

inline Active activation(int32_t kind, f32x16 x) { return kind ? gelu(x) : silu(x); }

// out = activation(gate) up, of rows [gate, up] of 2 n.
template <class T>
void gated(const Crew& crew, const typename T::element* gate_up, int64_t rows, int64_t n, int32_t kind,
           typename T::element* out) {
  crew.each(rows, [&](int64_t row) {
    const auto *gate = gate_up + row * 2 * n, *up = gate + n;
    for (int64_t i = 0; i < n; i += LANES) {
      const f32x16 active = activation(kind, lanes(gate + i, n - i)).value;
      put_lanes(out + row * n + i, active * lanes(up + i, n - i), n - i);
    }
  });
}

template <class T>
void gated_back(const Crew& crew, const typename T::element* grad, const typename T::element* gate_up, int64_t rows,
                int64_t n, int32_t kind, typename T::element* by) {
  crew.each(rows, [&](int64_t row) {
    const auto *g = grad + row * n, *gate = gate_up + row * 2 * n, *up = gate + n;
    auto* to = by + row * 2 * n;
    for (int64_t i = 0; i < n; i += LANES) {
      const Active active = activation(kind, lanes(gate + i, n - i));
      const f32x16 slope = lanes(g + i, n - i);
      put_lanes(to + i, slope * lanes(up + i, n - i) * active.slope, n - i);
      put_lanes(to + n + i, slope * active.value, n - i);
    }
  });
}

}  // namespace spill
