// Feed-forward experts: a router sends each token through a few of many gated units (arXiv 1701.06538).
#pragma once

#include "layer.h"

namespace spill {

// How tokens are routed: the best `per_token` of `count` experts, their shares summing to one if `normalized`.
struct Routing {
  int32_t count, per_token, normalized;
};

// The `per_token` largest of softmax(scores), the lower expert of equals first.
inline void choose(const Routing& how, float* scores, float* shares, int32_t* chosen) {
  float most = scores[0], total = 0, kept = 0;
  for (int e = 1; e < how.count; e++) most = std::max(most, scores[e]);
  for (int e = 0; e < how.count; e++) total += scores[e] = std::exp(scores[e] - most);
  for (int i = 0; i < how.per_token; i++) {
    const int best = int(std::max_element(scores, scores + how.count) - scores);
    chosen[i] = best;
    kept += shares[i] = scores[best] / total;
    scores[best] = -1;
  }
  if (how.normalized)
    for (int i = 0; i < how.per_token; i++) shares[i] /= kept;
}

template <class T>
Activations<T> normed_rows(Workspace& memory, int rows, int64_t hidden) {
  return {memory.get(Workspace::NORMED, rows * steps_of(hidden, T::PER_STEP) * sizeof(typename T::step)), rows, hidden};
}

// Where each of `rows` tokens goes: shares and experts, [rows][per_token]. The normed tokens stay in `memory`.
template <class T>
void route(const Shape& shape, const Routing& how, const Matrix& router, const float* norm, const float* x, int rows,
           Workspace& memory, float* shares, int32_t* chosen) {
  const Activations<T> normed = normed_rows<T>(memory, rows, shape.hidden);
  normalise<T>(memory.team, x, shape.hidden, norm, shape.eps, normed);
  const int64_t width = panels_of(how.count) * PANEL;
  auto* scores = (float*)memory.get(Workspace::QKV, sizeof(float) * rows * width);
  matmul<T>(memory.team, normed, router, Worn{}, [&](int t, int64_t panel, const float* out) {
    for (int r = 0; r < normed.tiles.size(t); r++)
      std::memcpy(scores + (normed.tiles.start(t) + r) * width + panel * PANEL, out + r * PANEL, PANEL * sizeof(float));
  });
  memory.team.each(rows, [&](int64_t row) {
    choose(how, scores + row * width, shares + row * how.per_token, chosen + row * how.per_token);
  });
}

// x[token] += share * expert(token) for some of the tokens that `route` left behind.
template <class T>
void expert(const Shape& shape, const Matrix& gate_up, const Matrix& down, int64_t inner, const int32_t* tokens,
            const float* shares, int count, int rows, Workspace& memory, float* x) {
  const auto bytes = [&](int64_t k) { return count * steps_of(k, T::PER_STEP) * sizeof(typename T::step); };
  const Activations<T> normed = normed_rows<T>(memory, rows, shape.hidden);
  const Activations<T> own(memory.get(Workspace::GATHERED, bytes(shape.hidden)), count, shape.hidden);
  const Activations<T> gated(memory.get(Workspace::GATED, bytes(inner)), count, inner);
  memory.team.each(count, [&](int64_t i) { own.copy(int(i), normed, tokens[i]); });
  gate<T>(memory.team, own, gate_up, Worn{}, shape.activation, inner, gated);
  matmul<T>(memory.team, gated, down, Worn{}, [&](int t, int64_t panel, const float* out) {
    const int64_t columns = std::min<int64_t>(PANEL, shape.hidden - panel * PANEL);
    for (int r = 0; r < gated.tiles.size(t); r++) {
      const int i = gated.tiles.start(t) + r;
      float* row = x + int64_t(tokens[i]) * shape.hidden + panel * PANEL;
      for (int64_t n = 0; n < columns; n++) row[n] += shares[i] * out[r * PANEL + n];
    }
  });
}

}  // namespace spill
