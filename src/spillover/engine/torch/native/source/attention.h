// Attention of the tokens of a pass over a cache of blocks.
//
// A block holds 32 positions of one layer and one key head, both halves packed as matrices that `multiply` reads:
// keys as 32 outputs over the head's dimensions, values as the head's dimensions over 32 positions. Probabilities
// are normalised as they go (online softmax: Milakov and Gimelshein, arXiv 1805.02867), a block at a time from the
// first that a query sees: a token's result is the same to the bit whether it came alone or in a prefill.
#pragma once

#include "kernels.h"

namespace spill {

constexpr int BLOCK = PANEL;  // positions
constexpr int HEAD = 256;     // the most dimensions of a head

// The keys and values of one layer: a block of `kv_heads` heads of `dim` dimensions every `stride` bytes.
template <class T>
struct Cache {
  char* data;
  int64_t stride;
  int kv_heads, dim;

  int64_t key_steps() const { return steps_of(dim, T::PER_STEP); }
  int64_t key_size() const { return key_steps() * T::PER_STEP * BLOCK; }
  int64_t size() const { return key_size() + panels_of(dim) * PANEL * BLOCK; }

  typename T::element* keys(int block, int head) const {
    return (typename T::element*)(data + block * stride) + head * size();
  }
  typename T::element* values(int block, int head) const { return keys(block, head) + key_size(); }

  // `key` and `value` have PANEL floats of room beyond their end.
  void write(int block, int head, int place, const float* key, const float* value) const {
    typename T::element* v = values(block, head);
    const int steps = BLOCK / T::PER_STEP, step = place / T::PER_STEP, part = place % T::PER_STEP;
    put<T>(key, dim, (typename T::step*)keys(block, head) + place, BLOCK);
    for (int d = 0; d < dim; d += PANEL) {
      typename T::element converted[PANEL];
      T::of(value + d, converted);
      typename T::element* to = v + ((d / PANEL * steps + step) * PANEL) * T::PER_STEP + part;
      for (int i = 0; i < PANEL && d + i < dim; i++) to[i * T::PER_STEP] = converted[i];
    }
  }
};

struct Attend {
  float scale, softcap;  // softcap 0: none
  int window;            // 0: everything before
};

// Up to ROWS queries of one key head: `x` in a tile, `positions` ascending, `out` [rows][dim].
template <class T>
struct Queries {
  int rows;
  const typename T::step* x;
  const int* positions;
  float* out;
};

// Scores of one block become probabilities in `tile`; `out` is scaled to the new largest score.
template <class T>
void soften(const Attend& how, const Queries<T>& q, int first, int width, float* scores, float* best, float* total,
            typename T::step* tile) {
  float gone[LANES] = {};  // by how much each row's largest score grew
  f32x16 halves[ROWS][2];
  for (int r = 0; r < q.rows; r++) {
    const int newest = q.positions[r], oldest = how.window ? newest - how.window + 1 : 0;
    for (int half = 0; half < 2; half++) {
      const i32x16 position = i32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + (first + half * LANES);
      f32x16 s = load<f32x16>(scores + r * PANEL + half * LANES) * how.scale;
      if (how.softcap != 0) s = how.softcap * tanh(s / how.softcap);
      halves[r][half] = ((position <= newest) & (position >= oldest)) ? s : splat(-__builtin_inff());
    }
    const float most = largest(maximum(halves[r][0], halves[r][1])), before = best[r];
    best[r] = most > before ? most : before;
    gone[r] = before == best[r] ? 0 : before - best[r];
  }
  float factors[LANES];
  store(factors, exp(load<f32x16>(gone)));
  for (int r = 0; r < q.rows; r++) {
    const float shift = best[r] == -__builtin_inff() ? 0 : best[r];
    const f32x16 low = exp(halves[r][0] - shift), high = exp(halves[r][1] - shift);
    total[r] = total[r] * factors[r] + sum(low + high);
    for (int d = 0; d < width; d += LANES) store(q.out + r * width + d, load<f32x16>(q.out + r * width + d) * factors[r]);
    float p[PANEL];
    store(p, low);
    store(p + LANES, high);
    put<T>(p, BLOCK, tile + r, q.rows);
  }
}

// `out` becomes [rows][32 * panels of dim].
template <class T>
void attend(const Attend& how, const Cache<T>& cache, const int* blocks, int head, const Queries<T>& q) {
  const int panels = int(panels_of(cache.dim)), width = panels * PANEL, steps = BLOCK / T::PER_STEP;
  float best[ROWS], total[ROWS] = {};
  for (int r = 0; r < q.rows; r++) best[r] = -__builtin_inff();
  std::memset(q.out, 0, sizeof(float) * q.rows * width);
  const int from = how.window ? q.positions[0] - how.window + 1 : 0;
  for (int b = from > 0 ? from / BLOCK : 0; b <= q.positions[q.rows - 1] / BLOCK; b++) {
    float scores[ROWS * PANEL];
    typename T::step tile[ROWS * BLOCK / T::PER_STEP];
    multiply<T>(q.rows, q.x, (typename T::step*)cache.keys(blocks[b], head), cache.key_steps(), scores);
    soften<T>(how, q, b * BLOCK, width, scores, best, total, tile);
    for (int p = 0; p < panels; p++) {
      float mixed[ROWS * PANEL];
      const typename T::step* v = (typename T::step*)cache.values(blocks[b], head) + int64_t(p) * steps * PANEL;
      multiply<T>(q.rows, tile, v, steps, mixed);
      for (int r = 0; r < q.rows; r++)
        for (int d = 0; d < PANEL; d += LANES) {
          float* at = q.out + r * width + p * PANEL + d;
          store(at, load<f32x16>(at) + load<f32x16>(mixed + r * PANEL + d));
        }
    }
  }
  for (int r = 0; r < q.rows; r++)
    for (int d = 0; d < width; d += LANES) store(q.out + r * width + d, load<f32x16>(q.out + r * width + d) / total[r]);
}

}  // namespace spill
