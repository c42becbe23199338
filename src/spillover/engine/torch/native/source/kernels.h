// Products with frozen matrices that were packed once: y = x W^T for a few rows of x at a time.
//
// A *step* is what one multiply-add of a lane consumes: one float32, or a pair of bfloat16. A packed matrix is
// [N / 32][K / step][32] steps, so that a kernel reads it from front to back. Rows of x come in *tiles* of up to
// ROWS rows, stored [K / step][rows] steps for the same reason.
//
// An output is summed over K from front to back whatever tile its row is in and whatever thread computes it: a
// row's result does not depend on its batch mates, to the bit.
#pragma once

#include "team.h"
#include "vector.h"

namespace spill {

#if defined(__AVX512F__)
constexpr int ROWS = 14;  // 28 of 32 registers hold sums
#else
constexpr int ROWS = 3;
#endif

struct Wide {  // float32
  typedef float element;
  typedef float step;
  static constexpr int PER_STEP = 1;

  static element of(float x) { return x; }
  static void of(const float* from, element* to) { std::memcpy(to, from, PANEL * sizeof(float)); }
  static f32x16 dot(f32x16 sum, const step* w, step x) { return fma(load<f32x16>(w), splat(x), sum); }
};

struct Narrow {  // bfloat16, summed in float32
  typedef uint16_t element;
  typedef uint32_t step;
  static constexpr int PER_STEP = 2;

  static element of(float x) { return narrow(x); }
  static void of(const float* from, element* to) {  // a panel of them
    narrow(from, to);
    narrow(from + LANES, to + LANES);
  }
  static f32x16 dot(f32x16 sum, const step* w, step x) {
#if defined(__AVX512BF16__)
    return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)load<u32x16>(w), (__m512bh)(u32x16{} + x));
#else
    const u32x16 pair = load<u32x16>(w);
    sum = fma((f32x16)(pair << 16), splat(widen(uint16_t(x))), sum);
    return fma((f32x16)(pair & 0xFFFF0000u), splat(widen(uint16_t(x >> 16))), sum);
#endif
  }
};

inline int64_t steps_of(int64_t k, int per_step) { return (k + per_step - 1) / per_step; }
inline int64_t panels_of(int64_t n) { return (n + PANEL - 1) / PANEL; }

// Rows 0..count-1 in tiles of nearly equal size.
struct Tiles {
  int rows, count;

  explicit Tiles(int rows) : rows(rows), count((rows + ROWS - 1) / ROWS) {}
  int start(int tile) const { return int(int64_t(rows) * tile / count); }
  int size(int tile) const { return start(tile + 1) - start(tile); }
  int of(int row) const {
    int tile = int(int64_t(row) * count / rows);
    while (start(tile + 1) <= row) tile++;
    while (start(tile) > row) tile--;
    return tile;
  }
};

template <class T, int R>
void multiply(const typename T::step* x, const typename T::step* w, int64_t steps, float* out) {
  f32x16 sums[R][2] = {};
  for (int64_t k = 0; k < steps; k++, w += PANEL, x += R) {
#pragma GCC unroll 14
    for (int r = 0; r < R; r++) {
      sums[r][0] = T::dot(sums[r][0], w, x[r]);
      sums[r][1] = T::dot(sums[r][1], w + LANES, x[r]);
    }
  }
#pragma GCC unroll 14
  for (int r = 0; r < R; r++) {
    store(out + r * PANEL, sums[r][0]);
    store(out + r * PANEL + LANES, sums[r][1]);
  }
}

// `rows` rows against one panel: `out` is [rows][32].
template <class T, int R = ROWS>
inline void multiply(int rows, const typename T::step* x, const typename T::step* w, int64_t steps, float* out) {
  if constexpr (R == 1) {
    multiply<T, 1>(x, w, steps, out);
  } else {
    if (rows == R) return multiply<T, R>(x, w, steps, out);
    multiply<T, R - 1>(rows, x, w, steps, out);
  }
}

// `count` values of one row become steps of a tile of `rows` rows; a last step they do not fill ends in zero.
template <class T>
void put(const float* values, int64_t count, typename T::step* out, int rows) {
  for (int64_t from = 0; from < count; from += PANEL) {
    const int some = int(std::min<int64_t>(PANEL, count - from));
    float padded[PANEL] = {};
    if (some < PANEL) std::memcpy(padded, values + from, some * sizeof(float));
    typename T::step steps[PANEL / T::PER_STEP];
    T::of(some < PANEL ? padded : values + from, (typename T::element*)steps);
    for (int i = 0; i < steps_of(some, T::PER_STEP); i++, out += rows) *out = steps[i];
  }
}

struct Parts;

// A matrix [n, k] in panels, or as `parts` of a file whose panels are made as they are wanted; its bias, or null.
struct Matrix {
  const void* data;
  const float* bias;
  int64_t n, k;
  const Parts* parts;
};

// A panel of `w`; one made from parts lies in memory of the calling thread, until it wants the next.
template <class T>
const typename T::step* panel_of(const Matrix& w, int64_t panel, int which = 0);

// Rows of activations in tiles; padding columns are zero.
template <class T>
struct Activations {
  typename T::element* data;
  Tiles tiles;
  int64_t steps;

  Activations(void* memory, int rows, int64_t k)
      : data((typename T::element*)memory), tiles(rows), steps(steps_of(k, T::PER_STEP)) {}

  const typename T::step* tile(int t) const { return (typename T::step*)data + tiles.start(t) * steps; }

  // Row `row` as it is in `from`.
  void copy(int row, const Activations& from, int its_row) const {
    const int t = tiles.of(row), other = from.tiles.of(its_row);
    const int stride = tiles.size(t), its_stride = from.tiles.size(other);
    auto* to = (typename T::step*)data + tiles.start(t) * steps + row - tiles.start(t);
    const auto* source = from.tile(other) + its_row - from.tiles.start(other);
    for (int64_t k = 0; k < steps; k++) to[k * stride] = source[k * its_stride];
  }

  // Columns [from, from + count) of row `in` of tile t; `from` begins a step.
  void put(int t, int in, int64_t from, const float* values, int64_t count) const {
    const int64_t step = tiles.start(t) * steps + from / T::PER_STEP * tiles.size(t) + in;
    spill::put<T>(values, count, (typename T::step*)data + step, tiles.size(t));
  }
};

// An adapter beside a matrix: x A B, for the rows that wear it. `a` is [R, k], `b` is [n, R], scaled.
struct Adapter {
  Matrix a, b;
};

// Which adapter each row wears (-1: none), and those of the matrix at hand with the memory for x A.
struct Worn {
  const Adapter* adapters;  // null: none on this matrix
  int count;
  const int32_t* by_row;
  void* inner;        // count times Activations of `widest` columns
  int64_t widest;     // columns

  bool any(int adapter, int start, int rows) const {
    for (int r = start; r < start + rows; r++)
      if (by_row[r] == adapter) return true;
    return false;
  }
  template <class T>
  Activations<T> products(int adapter, int rows) const {
    const int64_t size = rows * steps_of(widest, T::PER_STEP) * sizeof(typename T::step);
    return {(char*)inner + adapter * size, rows, adapters[adapter].a.n};
  }
};

// x A of every adapter.
template <class T>
void project(Team& team, const Activations<T>& x, const Worn& worn) {
  team.each(int64_t(worn.count) * x.tiles.count, [&](int64_t item) {
    const int adapter = int(item / x.tiles.count), t = int(item % x.tiles.count), rows = x.tiles.size(t);
    const Matrix& a = worn.adapters[adapter].a;
    if (!a.data || !worn.any(adapter, x.tiles.start(t), rows)) return;
    const Activations<T> inner = worn.products<T>(adapter, x.tiles.rows);
    for (int64_t p = 0; p < panels_of(a.n); p++) {
      float out[ROWS * PANEL];
      multiply<T>(rows, x.tile(t), (const typename T::step*)a.data + p * x.steps * PANEL, x.steps, out);
      for (int r = 0; r < rows; r++)
        inner.put(t, r, p * PANEL, out + r * PANEL, std::min<int64_t>(PANEL, a.n - p * PANEL));
    }
  });
}

// One tile against the panel at `weights`, bias and adapters included: `out` is [rows][32].
template <class T>
void product(const Activations<T>& x, const Matrix& w, const typename T::step* weights, const Worn& worn, int t,
             int64_t panel, float* out) {
  const int rows = x.tiles.size(t), start = x.tiles.start(t);
  multiply<T>(rows, x.tile(t), weights, x.steps, out);
  if (w.bias)
    for (int r = 0; r < rows; r++)
      for (int half = 0; half < PANEL; half += LANES) {
        float* at = out + r * PANEL + half;
        store(at, load<f32x16>(at) + load<f32x16>(w.bias + panel * PANEL + half));
      }
  if (!worn.adapters) return;
  for (int adapter = 0; adapter < worn.count; adapter++) {
    const Matrix& b = worn.adapters[adapter].b;
    if (!b.data || !worn.any(adapter, start, rows)) continue;
    const Activations<T> inner = worn.products<T>(adapter, x.tiles.rows);
    float beside[ROWS * PANEL];
    multiply<T>(rows, inner.tile(t), (const typename T::step*)b.data + panel * inner.steps * PANEL, inner.steps, beside);
    for (int r = 0; r < rows; r++)
      if (worn.by_row[start + r] == adapter)
        for (int n = 0; n < PANEL; n++) out[r * PANEL + n] += beside[r * PANEL + n];
  }
}

// All of x W^T: `take(tile, panel, out)` gets each piece, [rows][32].
template <class T, class Take>
void matmul(Team& team, const Activations<T>& x, const Matrix& w, const Worn& worn, const Take& take) {
  if (worn.adapters) project<T>(team, x, worn);
  team.each(panels_of(w.n), [&](int64_t panel) {
    const typename T::step* weights = panel_of<T>(w, panel);
    for (int t = 0; t < x.tiles.count; t++) {
      float out[ROWS * PANEL];
      product<T>(x, w, weights, worn, t, panel, out);
      take(t, panel, out);
    }
  });
}

}  // namespace spill
