// One layer of a decoder-only transformer over the tokens of a pass.
#pragma once

#include <cmath>
#include <vector>

#include "attention.h"
#include "pack.h"

namespace spill {

// The numbers of a model that every layer shares.
struct Shape {
  int32_t hidden, heads, kv_heads, head_dim, intermediate, rotated;
  int32_t activation;  // 0: SiLU, 1: GELU by tanh
  float eps, scale, softcap;
};

// One layer's weights; a null norm is not applied. Adapters are arrays of the pass's length, or null.
struct Layer {
  Matrix qkv, out, gate_up, down;
  const float *input_norm, *q_norm, *k_norm, *post_attention_norm, *feed_norm, *post_feed_norm;
  const float *cos, *sin;  // [positions][rotated / 2]
  const Adapter *qkv_adapters, *out_adapters, *gate_up_adapters, *down_adapters;
  int32_t window;  // 0: none
  int32_t sparse;  // 1: experts follow, in calls of their own
};

// Consecutive tokens of one sequence: the cache's blocks hold it from position 0.
struct Run {
  int32_t first, count, position;
  const int32_t* blocks;
};

struct Pass {
  int32_t tokens, runs, adapters;
  const Run* run;
  const int32_t* adapter;  // [tokens]
  int64_t widest;          // columns of the widest x A
};

// Threads, and memory between the products of a layer, kept from pass to pass.
class Workspace {
 public:
  explicit Workspace(int threads) : team(threads) {}
  Team team;

  enum { NORMED, QKV, MIXED, GATED, AFTER, INNER, GATHERED, COUNT };
  void* get(int which, size_t bytes) {
    auto& buffer = buffers_[which];
    if (buffer.size() < bytes + 64) buffer = std::vector<char>(bytes + 64);
    return (void*)(((uintptr_t)buffer.data() + 63) & ~uintptr_t(63));
  }
  size_t bytes() const {
    size_t total = 0;
    for (const auto& buffer : buffers_) total += buffer.size();
    return total;
  }

 private:
  std::vector<char> buffers_[COUNT];
};

// 1 / sqrt(mean(x^2) + eps)
inline float inverse_size(const float* x, int n, float eps) {
  f32x16 squares{};
  int i = 0;
  for (; i + LANES <= n; i += LANES) squares = fma(load<f32x16>(x + i), load<f32x16>(x + i), squares);
  float total = sum(squares);
  for (; i < n; i++) total += x[i] * x[i];
  return 1.0f / std::sqrt(total / float(n) + eps);
}

inline void normalise(float* x, int n, const float* weight, float eps) {
  const float scale = inverse_size(x, n, eps);
  for (int i = 0; i < n; i++) x[i] = x[i] * scale * weight[i];
}

// Rows of `x`, normalised, as the input of a product.
template <class T>
void normalise(Team& team, const float* x, int n, const float* weight, float eps, const Activations<T>& to) {
  team.each(to.tiles.count, [&](int64_t t) {
    for (int r = 0; r < to.tiles.size(int(t)); r++) {
      const float* row = x + int64_t(to.tiles.start(int(t)) + r) * n;
      const float scale = inverse_size(row, n, eps);
      float part[PANEL];
      for (int i = 0; i < n; i += PANEL) {
        const int count = std::min(PANEL, n - i);
        for (int j = 0; j < count; j++) part[j] = row[i + j] * scale * weight[i + j];
        to.put(int(t), r, i, part, count);
      }
    }
  });
}

// x += norm(y): the norms that Gemma has after its products.
inline void add_normalised(Team& team, float* x, float* y, int rows, int n, const float* weight, float eps) {
  team.each(rows, [&](int64_t row) {
    normalise(y + row * n, n, weight, eps);
    for (int i = 0; i < n; i++) x[row * n + i] += y[row * n + i];
  });
}

inline f32x16 activate(f32x16 x, int kind) {
  if (kind == 0) return x / (1.0f + exp(-x));
  const f32x16 inner = 0.7978845608028654f * fma(0.044715f * x, x * x, x);
  return 0.5f * x * (1.0f + tanh(inner));
}

// act(gate) * up: the panels of `w` are those of the gate and then those of the other half.
template <class T>
void gate(Team& team, const Activations<T>& x, const Matrix& w, const Worn& worn, int activation, int64_t inner,
          const Activations<T>& to) {
  if (worn.adapters) project<T>(team, x, worn);
  const int64_t panels = panels_of(inner);
  team.each(panels, [&](int64_t panel) {
    const typename T::step *gates = panel_of<T>(w, panel, 0), *ups = panel_of<T>(w, panels + panel, 1);
    for (int t = 0; t < x.tiles.count; t++) {
      float gate[ROWS * PANEL], up[ROWS * PANEL];
      product<T>(x, w, gates, worn, t, panel, gate);
      product<T>(x, w, ups, worn, t, panels + panel, up);
      const int rows = x.tiles.size(t);
      for (int i = 0; i < rows * PANEL; i += LANES)
        store(gate + i, activate(load<f32x16>(gate + i), activation) * load<f32x16>(up + i));
      const int64_t columns = std::min<int64_t>(PANEL, inner - panel * PANEL);
      for (int r = 0; r < rows; r++) to.put(t, r, panel * PANEL, gate + r * PANEL, columns);
    }
  });
}

// Rotates pairs half of `rotated` apart (Su et al., arXiv 2104.09864).
inline void rotate(float* head, int rotated, const float* cos, const float* sin) {
  const int half = rotated / 2;
  for (int i = 0; i < half; i++) {
    const float low = head[i], high = head[i + half];
    head[i] = low * cos[i] - high * sin[i];
    head[i + half] = high * cos[i] + low * sin[i];
  }
}

template <class T>
class LayerPass {
 public:
  LayerPass(const Shape& shape, const Layer& layer, const Pass& pass, const Cache<T>& cache, Workspace& memory, float* x)
      : s_(shape), l_(layer), p_(pass), team_(memory.team), cache_(cache), x_(x),
        width_(panels_of((shape.heads + 2 * shape.kv_heads) * shape.head_dim) * PANEL),
        normed_(memory.get(Workspace::NORMED, size(shape.hidden)), pass.tokens, shape.hidden),
        mixed_(memory.get(Workspace::MIXED, size(shape.heads * shape.head_dim)), pass.tokens,
               int64_t(shape.heads) * shape.head_dim),
        gated_(memory.get(Workspace::GATED, size(shape.intermediate)), pass.tokens, shape.intermediate),
        qkv_((float*)memory.get(Workspace::QKV, sizeof(float) * (pass.tokens * width_ + PANEL))),
        after_((float*)memory.get(Workspace::AFTER, sizeof(float) * pass.tokens * shape.hidden)),
        inner_(memory.get(Workspace::INNER, pass.adapters * size(pass.widest))) {}

  void run() {
    normalise<T>(team_, x_, s_.hidden, l_.input_norm, s_.eps, normed_);
    matmul<T>(team_, normed_, l_.qkv, worn(l_.qkv_adapters), [&](int t, int64_t panel, const float* out) {
      for (int r = 0; r < normed_.tiles.size(t); r++)
        std::memcpy(qkv_ + (normed_.tiles.start(t) + r) * width_ + panel * PANEL, out + r * PANEL, PANEL * sizeof(float));
    });
    remember();
    mix();
    onto(mixed_, l_.out, l_.out_adapters, l_.post_attention_norm);
    if (l_.sparse) return;
    normalise<T>(team_, x_, s_.hidden, l_.feed_norm, s_.eps, normed_);
    gate<T>(team_, normed_, l_.gate_up, worn(l_.gate_up_adapters), s_.activation, s_.intermediate, gated_);
    onto(gated_, l_.down, l_.down_adapters, l_.post_feed_norm);
  }

 private:
  size_t size(int64_t k) const { return p_.tokens * steps_of(k, T::PER_STEP) * sizeof(typename T::step); }

  Worn worn(const Adapter* adapters) const { return {adapters, p_.adapters, p_.adapter, inner_, p_.widest}; }

  const Run& run_of(int token) const {
    int low = 0, high = p_.runs - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (p_.run[middle].first <= token) low = middle; else high = middle - 1;
    }
    return p_.run[low];
  }

  // Norms and rotation of queries and keys; keys and values go into the cache.
  void remember() {
    const int dim = s_.head_dim;
    team_.each(p_.tokens, [&](int64_t token) {
      const Run& run = run_of(int(token));
      const int position = run.position + int(token) - run.first;
      float* row = qkv_ + token * width_;
      const float *cos = l_.cos + int64_t(position) * (s_.rotated / 2), *sin = l_.sin + int64_t(position) * (s_.rotated / 2);
      for (int head = 0; head < s_.heads + s_.kv_heads; head++) {
        const float* weight = head < s_.heads ? l_.q_norm : l_.k_norm;
        if (weight) normalise(row + head * dim, dim, weight, s_.eps);
        rotate(row + head * dim, s_.rotated, cos, sin);
      }
      const float *keys = row + s_.heads * dim, *values = keys + s_.kv_heads * dim;
      for (int head = 0; head < s_.kv_heads; head++)
        cache_.write(run.blocks[position / BLOCK], head, position % BLOCK, keys + head * dim, values + head * dim);
    });
  }

  // Attention: a task is some tokens of one run under one key head, as many as fill a tile.
  void mix() {
    const int group = s_.heads / s_.kv_heads, together = group < ROWS ? ROWS / group : 1;
    int tasks = 0;
    for (int r = 0; r < p_.runs; r++) tasks += (p_.run[r].count + together - 1) / together;
    team_.each(int64_t(tasks) * s_.kv_heads, [&](int64_t item) {
      int part = int(item / s_.kv_heads), r = 0;
      for (; part >= (p_.run[r].count + together - 1) / together; r++) part -= (p_.run[r].count + together - 1) / together;
      const int start = part * together, left = p_.run[r].count - start;
      mix_some(p_.run[r], start, left < together ? left : together, int(item % s_.kv_heads), group);
    });
  }

  void mix_some(const Run& run, int start, int count, int kv_head, int group) {
    const int dim = s_.head_dim, all = count * group;
    for (int from = 0; from < all; from += ROWS) {  // more than one turn only where a group exceeds a tile
      const int rows = all - from < ROWS ? all - from : ROWS;
      typename T::step tile[ROWS * HEAD / T::PER_STEP];
      int positions[ROWS];
      float out[ROWS * HEAD];
      for (int r = 0; r < rows; r++) {
        const int token = start + (from + r) / group, head = kv_head * group + (from + r) % group;
        positions[r] = run.position + token;
        const float* q = qkv_ + (run.first + token) * width_ + head * dim;
        put<T>(q, dim, tile + r, rows);
      }
      attend<T>({s_.scale, s_.softcap, l_.window}, cache_, run.blocks, kv_head,
                {rows, tile, positions, out});
      for (int r = 0; r < rows; r++) {
        const int token = run.first + start + (from + r) / group, head = kv_head * group + (from + r) % group;
        keep(token, head, out + r * panels_of(dim) * PANEL);
      }
    }
  }

  void keep(int token, int head, const float* mixed) {
    const int tile = mixed_.tiles.of(token), in = token - mixed_.tiles.start(tile);
    mixed_.put(tile, in, int64_t(head) * s_.head_dim, mixed, s_.head_dim);
  }

  // x += in W^T, or x += norm(in W^T).
  void onto(const Activations<T>& in, const Matrix& w, const Adapter* adapters, const float* norm) {
    float* to = norm ? after_ : x_;
    matmul<T>(team_, in, w, worn(adapters), [&](int t, int64_t panel, const float* out) {
      const int64_t columns = s_.hidden - panel * PANEL < PANEL ? s_.hidden - panel * PANEL : PANEL;
      for (int r = 0; r < in.tiles.size(t); r++) {
        float* row = to + int64_t(in.tiles.start(t) + r) * s_.hidden + panel * PANEL;
        for (int64_t n = 0; n < columns; n++) row[n] = norm ? out[r * PANEL + n] : row[n] + out[r * PANEL + n];
      }
    });
    if (norm) add_normalised(team_, x_, after_, p_.tokens, s_.hidden, norm, s_.eps);
  }

  const Shape& s_;
  const Layer& l_;
  const Pass& p_;
  Team& team_;
  const Cache<T> cache_;
  float* x_;
  const int64_t width_;
  const Activations<T> normed_, mixed_, gated_;
  float *qkv_, *after_;
  void* inner_;
};

}  // namespace spill
