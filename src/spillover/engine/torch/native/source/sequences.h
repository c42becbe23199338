// Causal attention of whole sequences, and its gradient, for training.
//
// Nothing of size [queries, keys] is kept: the backward makes the probabilities again from each query's log-sum, as
// FlashAttention does (Dao et al., arXiv 2205.14135). Work goes in blocks of 32 keys by 32 queries, a row of lanes for
// each key: what belongs to a query (its largest score, its sum) is then a lane, and nothing is summed across lanes.
// One thread computes one head of one sequence, always in the same order.
#pragma once

#include <memory>
#include <vector>

#include "attention.h"
#include "pointwise.h"

namespace spill {

constexpr int SIDE = PANEL;  // keys and queries of a block

// The rotated queries, keys and values of a pass, [tokens][heads + 2 kv_heads][dim], and its sequences.
struct Sequences {
  int32_t count, heads, kv_heads, dim;
  const int64_t *starts, *lengths;

  int64_t row() const { return int64_t(heads + 2 * kv_heads) * dim; }
  int64_t blocks(int64_t sequence) const { return (lengths[sequence] + SIDE - 1) / SIDE; }
};

// The steps of a row of `k` elements, `stride` apart; what a last step lacks is zero.
template <class T>
inline void scatter(const typename T::element* from, int64_t k, typename T::step* to, int64_t stride) {
  const int64_t whole = k / T::PER_STEP;
  for (int64_t s = 0; s < whole; s++) to[s * stride] = load<typename T::step>(from + s * T::PER_STEP);
  if (whole * T::PER_STEP == k) return;
  typename T::step last{};
  std::memcpy(&last, from + k - 1, sizeof *from);
  to[whole * stride] = last;
}

// The same columns of as many rows as one step takes (of those from `rows` on, zeros), as steps.
inline void interleave(const float* from, int64_t, int, int64_t count, float* to) {
  std::memcpy(to, from, count * sizeof *from);
}
inline void interleave(const uint16_t* from, int64_t stride, int rows, int64_t count, uint32_t* to) {
  const uint16_t* second = rows > 1 ? from + stride : from;
  const uint32_t mask = rows > 1 ? 0xFFFF0000u : 0;
  for (int64_t i = 0; i < count; i++) to[i] = uint32_t(from[i]) | (uint32_t(second[i]) << 16 & mask);
}

// Rows of a block of floats as one row of steps.
inline void join(const float* row, float* to) { std::memcpy(to, row, SIDE * sizeof(float)); }
inline void join(const float* rows, uint32_t* to) {
  for (int half = 0; half < SIDE; half += LANES)
    store(to + half, narrow(load<f32x16>(rows + half)) | narrow(load<f32x16>(rows + SIDE + half)) << 16);
}

// Up to 32 rows of one head, the left side of a product: tiles as `multiply` wants them.
template <class T>
struct Left {
  typedef typename T::step step;
  static size_t size(int64_t k) { return SIDE * steps_of(k, T::PER_STEP); }

  // `rows` rows of `k` elements, `stride` apart; those up to 32 are zero.
  static void rows(const typename T::element* from, int64_t stride, int rows, int64_t k, step* to) {
    const int64_t steps = steps_of(k, T::PER_STEP);
    std::memset(to, 0, size(k) * sizeof(step));
    const Tiles tiles(SIDE);
    for (int t = 0; t < tiles.count; t++)
      for (int r = tiles.start(t); r < std::min(tiles.start(t + 1), rows); r++)
        scatter<T>(from + r * stride, k, to + tiles.start(t) * steps + r - tiles.start(t), tiles.size(t));
  }

  // A block of floats [32][32], its rows.
  static void block(const float* from, step* to) {
    const Tiles tiles(SIDE);
    for (int t = 0; t < tiles.count; t++)
      for (int r = tiles.start(t); r < tiles.start(t + 1); r++)
        put<T>(from + r * SIDE, SIDE, to + tiles.start(t) * (SIDE / T::PER_STEP) + r - tiles.start(t), tiles.size(t));
  }

  // The same block, its columns as rows.
  static void turned(const float* from, step* to) {
    const Tiles tiles(SIDE);
    for (int s = 0; s < SIDE / T::PER_STEP; s++) {
      step pairs[SIDE];
      join(from + s * T::PER_STEP * SIDE, pairs);
      for (int t = 0; t < tiles.count; t++)
        std::memcpy(to + tiles.start(t) * (SIDE / T::PER_STEP) + s * tiles.size(t), pairs + tiles.start(t),
                    tiles.size(t) * sizeof(step));
    }
  }
};

// The right side: panels of 32 outputs.
template <class T>
struct Right {
  typedef typename T::step step;

  // The outputs are 32 rows (those from `rows` on zero), summed over their `k` elements: one panel.
  static void rows(const typename T::element* from, int64_t stride, int rows, int64_t k, step* to) {
    const int64_t steps = steps_of(k, T::PER_STEP);
    std::memset(to, 0, steps * PANEL * sizeof(step));
    for (int r = 0; r < rows; r++) scatter<T>(from + r * stride, k, to + r, PANEL);
  }

  // The outputs are `k` columns, summed over 32 rows: panels_of(k) panels of 32 / PER_STEP steps.
  static void columns(const typename T::element* from, int64_t stride, int rows, int64_t k, step* to) {
    std::memset(to, 0, panels_of(k) * PANEL * (SIDE / T::PER_STEP) * sizeof(step));
    for (int64_t panel = 0; panel < panels_of(k); panel++)
      for (int r = 0; r < rows; r += T::PER_STEP)
        interleave(from + r * stride + panel * PANEL, stride, rows - r, std::min<int64_t>(PANEL, k - panel * PANEL),
                   to + (panel * (SIDE / T::PER_STEP) + r / T::PER_STEP) * PANEL);
  }
};

// out [32][panels * 32] = or += left times right.
template <class T, bool ADD>
inline void block_product(const typename T::step* left, const typename T::step* right, int64_t steps, int64_t panels,
                          float* out) {
  const Tiles tiles(SIDE);
  for (int t = 0; t < tiles.count; t++)
    for (int64_t panel = 0; panel < panels; panel++) {
      float part[ROWS * PANEL];
      const int rows = tiles.size(t);
      multiply<T>(rows, left + tiles.start(t) * steps, right + panel * steps * PANEL, steps, part);
      for (int r = 0; r < rows; r++)
        for (int half = 0; half < PANEL; half += LANES) {
          float* to = out + (tiles.start(t) + r) * panels * PANEL + panel * PANEL + half;
          const f32x16 value = load<f32x16>(part + r * PANEL + half);
          store(to, ADD ? load<f32x16>(to) + value : value);
        }
    }
}

// A head of one sequence as operands, block by block.
template <class T>
class Operands {
 public:
  typedef typename T::step step;

  Operands(const typename T::element* from, int64_t stride, int64_t length, int64_t k, bool left, bool rows, bool columns)
      : lefts_(Left<T>::size(k)), panel_(steps_of(k, T::PER_STEP) * PANEL),
        columns_(panels_of(k) * PANEL * (SIDE / T::PER_STEP)) {
    const int64_t blocks = (length + SIDE - 1) / SIDE;
    if (left) left_.resize(blocks * lefts_);
    if (rows) as_rows_.resize(blocks * panel_);
    if (columns) as_columns_.resize(blocks * columns_);
    for (int64_t b = 0; b < blocks; b++) {
      const int some = int(std::min<int64_t>(SIDE, length - b * SIDE));
      const auto* at = from + b * SIDE * stride;
      if (left) Left<T>::rows(at, stride, some, k, left_.data() + b * lefts_);
      if (rows) Right<T>::rows(at, stride, some, k, as_rows_.data() + b * panel_);
      if (columns) Right<T>::columns(at, stride, some, k, as_columns_.data() + b * columns_);
    }
  }

  const step* left(int64_t block) const { return left_.data() + block * lefts_; }
  const step* rows(int64_t block) const { return as_rows_.data() + block * panel_; }
  const step* columns(int64_t block) const { return as_columns_.data() + block * columns_; }

 private:
  size_t lefts_, panel_, columns_;
  std::vector<step> left_, as_rows_, as_columns_;
};

// Scores of a block, [32 keys][32 queries]: scaled, capped, minus infinity where a query does not see a key.
template <class T>
inline void block_scores(const Attend& how, const typename T::step* keys, const typename T::step* queries, int64_t steps,
                         int64_t first_key, int64_t first_query, float* out) {
  block_product<T, false>(keys, queries, steps, 1, out);
  const bool edge = first_key + SIDE > first_query || (how.window && first_query + SIDE - first_key > how.window);
  for (int key = 0; key < SIDE; key++)
    for (int half = 0; half < SIDE; half += LANES) {
      float* at = out + key * SIDE + half;
      f32x16 s = load<f32x16>(at) * how.scale;
      if (how.softcap != 0) s = how.softcap * tanh(s / how.softcap);
      if (edge) {
        const i32x16 behind = i32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} +
                              int(first_query - first_key + half - key);
        i32x16 seen = behind >= 0;
        if (how.window) seen &= behind < how.window;
        s = seen ? s : splat(-__builtin_inff());
      }
      store(at, s);
    }
}

// The first block of keys that any query of a block sees.
inline int64_t first_block(const Attend& how, int64_t block) {
  const int64_t oldest = how.window ? block * SIDE - how.window + 1 : 0;
  return oldest > 0 ? oldest / SIDE : 0;
}

// One head of one sequence: `out` [length][heads * dim] and `sums`, the log of each query's total.
template <class T>
void head_forward(const Attend& how, const Sequences& all, const typename T::element* heads, int64_t sequence, int head,
                  typename T::element* out, float* sums) {
  const int64_t dim = all.dim, length = all.lengths[sequence], start = all.starts[sequence], stride = all.row();
  const int64_t steps = steps_of(dim, T::PER_STEP), panels = panels_of(dim), blocks = all.blocks(sequence);
  const int shared = head / (all.heads / all.kv_heads);
  const auto* base = heads + start * stride;
  const Operands<T> q(base + head * dim, stride, length, dim, false, true, false);
  const Operands<T> k(base + (all.heads + shared) * dim, stride, length, dim, true, false, false);
  const Operands<T> v(base + (all.heads + all.kv_heads + shared) * dim, stride, length, dim, false, false, true);
  std::vector<float> scores(blocks * SIDE * SIDE), mixed(SIDE * panels * PANEL);
  std::vector<typename T::step> tile(Left<T>::size(SIDE));
  for (int64_t block = 0; block < blocks; block++) {
    const int64_t from = first_block(how, block);
    f32x16 best[2] = {splat(-__builtin_inff()), splat(-__builtin_inff())}, total[2] = {};
    for (int64_t b = from; b <= block; b++) {
      float* s = scores.data() + b * SIDE * SIDE;
      block_scores<T>(how, k.left(b), q.rows(block), steps, b * SIDE, block * SIDE, s);
      for (int i = 0; i < SIDE * SIDE; i += LANES) best[i / LANES % 2] = maximum(best[i / LANES % 2], load<f32x16>(s + i));
    }
    std::fill(mixed.begin(), mixed.end(), 0.0f);
    for (int64_t b = from; b <= block; b++) {
      float* s = scores.data() + b * SIDE * SIDE;
      for (int i = 0; i < SIDE * SIDE; i += LANES) {
        const f32x16 p = exp(load<f32x16>(s + i) - best[i / LANES % 2]);
        total[i / LANES % 2] += p;
        store(s + i, p);
      }
      Left<T>::turned(s, tile.data());
      block_product<T, true>(tile.data(), v.columns(b), SIDE / T::PER_STEP, panels, mixed.data());
    }
    float totals[SIDE], bests[SIDE];
    for (int half = 0; half < 2; half++) store(totals + half * LANES, total[half]), store(bests + half * LANES, best[half]);
    for (int r = 0; r < SIDE && block * SIDE + r < length; r++) {
      auto* to = out + ((start + block * SIDE + r) * all.heads + head) * dim;
      for (int64_t d = 0; d < dim; d += LANES)
        put_lanes(to + d, load<f32x16>(mixed.data() + r * panels * PANEL + d) / totals[r], dim - d);
      sums[block * SIDE + r] = bests[r] + std::log(totals[r]);
    }
  }
}

// Gradients of one head of one sequence. That of its queries goes to `by_heads`; those of the keys and values that it
// shares with its group are float32 [blocks * 32][32 * panels] each, keys first.
template <class T>
void head_back(const Attend& how, const Sequences& all, const typename T::element* heads, const typename T::element* out,
               const float* sums, const typename T::element* grad, int64_t sequence, int head,
               typename T::element* by_heads, float* by_shared) {
  const int64_t dim = all.dim, length = all.lengths[sequence], start = all.starts[sequence], stride = all.row();
  const int64_t steps = steps_of(dim, T::PER_STEP), panels = panels_of(dim), blocks = all.blocks(sequence);
  const int64_t width = panels * PANEL, inner = SIDE / T::PER_STEP, across = int64_t(all.heads) * dim;
  const int shared = head / (all.heads / all.kv_heads);
  const auto* base = heads + start * stride;
  const auto *upper = grad + start * across + head * dim, *mixed = out + start * across + head * dim;
  const Operands<T> q(base + head * dim, stride, length, dim, false, true, true);
  const Operands<T> k(base + (all.heads + shared) * dim, stride, length, dim, true, false, true);
  const Operands<T> v(base + (all.heads + all.kv_heads + shared) * dim, stride, length, dim, true, false, false);
  const Operands<T> g(upper, across, length, dim, false, true, true);
  std::vector<float> by_q(SIDE * width);
  std::vector<typename T::step> tile(Left<T>::size(SIDE));
  float *by_k = by_shared, *by_v = by_shared + blocks * SIDE * width;
  std::fill(by_shared, by_shared + 2 * blocks * SIDE * width, 0.0f);
  for (int64_t block = 0; block < blocks; block++) {
    const int rows = int(std::min<int64_t>(SIDE, length - block * SIDE));
    float totals[SIDE], delta[SIDE] = {};  // of queries beyond the end: probability 0
    for (int r = 0; r < SIDE; r++) totals[r] = r < rows ? sums[block * SIDE + r] : __builtin_inff();
    for (int r = 0; r < rows; r++) {
      f32x16 sum_of{};
      for (int64_t d = 0; d < dim; d += LANES) {
        const int64_t at = (block * SIDE + r) * across + d;
        sum_of = fma(lanes(upper + at, dim - d), lanes(mixed + at, dim - d), sum_of);
      }
      delta[r] = sum(sum_of);
    }
    std::fill(by_q.begin(), by_q.end(), 0.0f);
    for (int64_t b = first_block(how, block); b <= block; b++) {
      float p[SIDE * SIDE], by_p[SIDE * SIDE];
      block_scores<T>(how, k.left(b), q.rows(block), steps, b * SIDE, block * SIDE, p);
      block_product<T, false>(v.left(b), g.rows(block), steps, 1, by_p);
      for (int i = 0; i < SIDE * SIDE; i += LANES) {
        const int lane = i % SIDE;
        const f32x16 s = load<f32x16>(p + i), likely = exp(s - load<f32x16>(totals + lane));
        f32x16 by_s = likely * (load<f32x16>(by_p + i) - load<f32x16>(delta + lane)) * how.scale;
        if (how.softcap != 0) {
          const f32x16 part = s / how.softcap, slope = 1.0f - part * part;
          by_s = likely > 0.0f ? by_s * slope : f32x16{};  // a hidden score is infinite
        }
        store(p + i, likely);
        store(by_p + i, by_s);
      }
      Left<T>::block(p, tile.data());
      block_product<T, true>(tile.data(), g.columns(block), inner, panels, by_v + b * SIDE * width);
      Left<T>::block(by_p, tile.data());
      block_product<T, true>(tile.data(), q.columns(block), inner, panels, by_k + b * SIDE * width);
      Left<T>::turned(by_p, tile.data());
      block_product<T, true>(tile.data(), k.columns(b), inner, panels, by_q.data());
    }
    for (int r = 0; r < rows; r++) {
      auto* to = by_heads + (start + block * SIDE + r) * stride + head * dim;
      for (int64_t d = 0; d < dim; d += LANES) put_lanes(to + d, load<f32x16>(by_q.data() + r * width + d), dim - d);
    }
  }
}

template <class T>
void sequences_forward(const Crew& crew, const Attend& how, const Sequences& all, const typename T::element* heads,
                       typename T::element* out, float* sums) {
  crew.each(int64_t(all.count) * all.heads, [&](int64_t item) {
    const int64_t sequence = item / all.heads, head = item % all.heads;
    // [heads][length] of each sequence, one after the other
    float* its = sums + all.starts[sequence] * all.heads + head * all.lengths[sequence];
    head_forward<T>(how, all, heads, sequence, int(head), out, its);
  });
}

template <class T>
void sequences_back(const Crew& crew, const Attend& how, const Sequences& all, const typename T::element* heads,
                    const typename T::element* out, const float* sums, const typename T::element* grad,
                    typename T::element* by_heads) {
  const int64_t width = panels_of(all.dim) * PANEL, group = all.heads / all.kv_heads, kinds = 2 * all.kv_heads;
  // per sequence and head, the gradients of keys and of values: summed over a group afterwards, in one order
  std::vector<int64_t> at(all.count + 1);
  for (int64_t i = 0; i < all.count; i++) at[i + 1] = at[i] + all.heads * 2 * all.blocks(i) * SIDE * width;
  const std::unique_ptr<float[]> by_shared(new float[at[all.count]]);
  crew.each(int64_t(all.count) * all.heads, [&](int64_t item) {
    const int64_t sequence = item / all.heads, head = item % all.heads;
    const float* its = sums + all.starts[sequence] * all.heads + head * all.lengths[sequence];
    float* own = by_shared.get() + at[sequence] + head * 2 * all.blocks(sequence) * SIDE * width;
    head_back<T>(how, all, heads, out, its, grad, sequence, int(head), by_heads, own);
  });
  crew.each(all.count * kinds, [&](int64_t item) {
    const int64_t sequence = item / kinds, which = item % kinds, half = all.blocks(sequence) * SIDE * width;
    const float* from = by_shared.get() + at[sequence] + which % all.kv_heads * group * 2 * half + which / all.kv_heads * half;
    for (int64_t place = 0; place < all.lengths[sequence]; place++, from += width) {
      auto* to = by_heads + (all.starts[sequence] + place) * all.row() + (all.heads + which) * all.dim;
      for (int64_t d = 0; d < all.dim; d += LANES) {
        f32x16 total{};
        for (int64_t one = 0; one < group; one++) total += load<f32x16>(from + one * 2 * half + d);
        put_lanes(to + d, total, all.dim - d);
      }
    }
  });
}

}  // namespace spill
