// The functions that Python calls; `wide` chooses float32 (1) or bfloat16 (0).
#include "experts.h"

#include <algorithm>

using namespace spill;

namespace {

template <class T>
void pack(Team& team, const Parts& parts, int64_t n, int64_t k, typename T::step* to) {
  team.each(panels_of(n), [&](int64_t panel) {
    const char* rows[PANEL];
    parts.rows_of(panel, k, rows);
    pack_panel<T>(rows, Kind(parts.kind), k, to + panel * steps_of(k, T::PER_STEP) * PANEL);
  });
}

template <class T>
void forward(const Shape& shape, const Layer& layer, const Pass& pass, void* cache, int64_t stride,
             Workspace& memory, float* x) {
  LayerPass<T> work(shape, layer, pass, {(char*)cache, stride, shape.kv_heads, shape.head_dim}, memory, x);
  work.run();
}

template <class T>
void logits(const Shape& shape, const Matrix& head, const float* norm, float softcap, const float* x, int rows,
            Workspace& memory, float* to) {
  const size_t size = rows * steps_of(shape.hidden, T::PER_STEP) * sizeof(typename T::step);
  const Activations<T> normed(memory.get(Workspace::NORMED, size), rows, shape.hidden);
  normalise<T>(memory.team, x, shape.hidden, norm, shape.eps, normed);
  matmul<T>(memory.team, normed, head, Worn{}, [&](int t, int64_t panel, float* out) {
    const int64_t columns = std::min<int64_t>(head.n - panel * PANEL, PANEL);
    for (int r = 0; r < normed.tiles.size(t); r++) {
      float* row = out + r * PANEL;
      if (softcap != 0)
        for (int i = 0; i < PANEL; i += LANES) store(row + i, softcap * tanh(load<f32x16>(row + i) / softcap));
      std::memcpy(to + int64_t(normed.tiles.start(t) + r) * head.n + panel * PANEL, row, columns * sizeof(float));
    }
  });
}

int64_t most_likely(const float* x, int64_t n) {
  f32x16 best = splat(-__builtin_inff());
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) best = maximum(best, load<f32x16>(x + i));
  float most = largest(best);
  for (int64_t j = i; j < n; j++) most = x[j] > most ? x[j] : most;
  for (int64_t j = 0; j < n; j++)
    if (x[j] == most) return j;
  return 0;
}

// log(sum(e^x)), the sum in float64 a lane at a time.
double log_total(const float* x, int64_t n, float most) {
  double total = 0;
  int64_t i = 0;
  while (i + LANES <= n) {
    f32x16 part{};
    for (int64_t stop = std::min(n - LANES + 1, i + 64 * LANES); i < stop; i += LANES) part += exp(load<f32x16>(x + i) - most);
    total += sum(part);
  }
  for (; i < n; i++) total += std::exp(double(x[i]) - most);
  return most + std::log(total);
}

// The `top` largest of x, best first, the lower of equals first.
void best_of(const float* x, int64_t n, int top, int64_t* ids, std::vector<std::pair<float, int64_t>>& heap) {
  const auto worse = [](const auto& a, const auto& b) { return a.first > b.first || (a.first == b.first && a.second < b.second); };
  heap.clear();
  int64_t i = 0;
  for (; i < top; i++) heap.emplace_back(x[i], i);
  std::make_heap(heap.begin(), heap.end(), worse);
  const auto offer = [&](int64_t j) {
    if (x[j] <= heap.front().first) return;
    std::pop_heap(heap.begin(), heap.end(), worse);
    heap.back() = {x[j], j};
    std::push_heap(heap.begin(), heap.end(), worse);
  };
  for (; i + LANES <= n; i += LANES) {
    const f32x16 lanes = load<f32x16>(x + i);
    if (largest(lanes) <= heap.front().first) continue;
    for (int64_t j = i; j < i + LANES; j++) offer(j);
  }
  for (; i < n; i++) offer(i);
  std::sort(heap.begin(), heap.end(), worse);
  for (int j = 0; j < top; j++) ids[j] = heap[j].second;
}

}  // namespace

extern "C" {

int32_t spill_version() { return 1; }

void* spill_workspace(int32_t threads) { return new Workspace(threads); }
void spill_workspace_free(void* memory) {
  if (!((Workspace*)memory)->team.orphaned()) delete (Workspace*)memory;
}
int64_t spill_workspace_bytes(const void* memory) { return (int64_t)((const Workspace*)memory)->bytes(); }

// `to` has panels_of(n) * 32 * k (rounded up to a step) elements; n counts whole panels where parts lie apart.
void spill_pack(int32_t wide, const Parts* parts, int64_t n, int64_t k, void* to, void* memory) {
  Team& team = ((Workspace*)memory)->team;
  if (wide) pack<Wide>(team, *parts, n, k, (float*)to);
  else pack<Narrow>(team, *parts, n, k, (uint32_t*)to);
}

// Bytes of one block of one layer.
int64_t spill_block_bytes(int32_t wide, int32_t kv_heads, int32_t head_dim) {
  if (wide) return kv_heads * Cache<Wide>{nullptr, 0, kv_heads, head_dim}.size() * 4;
  return kv_heads * Cache<Narrow>{nullptr, 0, kv_heads, head_dim}.size() * 2;
}

// `cache` is where the layer lies in the first block; blocks follow one another every `stride` bytes.
void spill_layer(int32_t wide, const Shape* shape, const Layer* layer, const Pass* pass, void* cache,
                 int64_t stride, void* memory, float* x) {
  if (wide) forward<Wide>(*shape, *layer, *pass, cache, stride, *(Workspace*)memory, x);
  else forward<Narrow>(*shape, *layer, *pass, cache, stride, *(Workspace*)memory, x);
}

// After a sparse layer: where the tokens go, and then each expert that any goes to, in ascending order.
void spill_route(int32_t wide, const Shape* shape, const Routing* how, const Matrix* router, const float* norm,
                 const float* x, int32_t rows, void* memory, float* shares, int32_t* chosen) {
  if (wide) route<Wide>(*shape, *how, *router, norm, x, rows, *(Workspace*)memory, shares, chosen);
  else route<Narrow>(*shape, *how, *router, norm, x, rows, *(Workspace*)memory, shares, chosen);
}

void spill_expert(int32_t wide, const Shape* shape, const Matrix* gate_up, const Matrix* down, int64_t inner,
                  const int32_t* tokens, const float* shares, int32_t count, int32_t rows, void* memory, float* x) {
  if (wide) expert<Wide>(*shape, *gate_up, *down, inner, tokens, shares, count, rows, *(Workspace*)memory, x);
  else expert<Narrow>(*shape, *gate_up, *down, inner, tokens, shares, count, rows, *(Workspace*)memory, x);
}

void spill_logits(int32_t wide, const Shape* shape, const Matrix* head, const float* norm, float softcap, const float* x,
                  int32_t rows, void* memory, float* to) {
  if (wide) logits<Wide>(*shape, *head, norm, softcap, x, rows, *(Workspace*)memory, to);
  else logits<Narrow>(*shape, *head, norm, softcap, x, rows, *(Workspace*)memory, to);
}

void spill_argmax(const float* x, int64_t rows, int64_t n, int64_t* to, void* memory) {
  ((Workspace*)memory)->team.each(rows, [&](int64_t row) { to[row] = most_likely(x + row * n, n); });
}

// Log-probabilities of one token a row (`tokens`, by the rows of x in `rows`) and of the `top` best.
void spill_logprobs(const float* x, int64_t n, const int64_t* rows, const int64_t* tokens, int64_t count, int32_t top,
                    float* chosen, int64_t* ids, float* values, void* memory) {
  ((Workspace*)memory)->team.each(count, [&](int64_t i) {
    const float* row = x + rows[i] * n;
    std::vector<std::pair<float, int64_t>> heap;
    const double total = log_total(row, n, row[most_likely(row, n)]);
    chosen[i] = float(row[tokens[i]] - total);
    if (top) best_of(row, n, top, ids + i * top, heap);
    for (int j = 0; j < top; j++) values[i * top + j] = float(row[ids[i * top + j]] - total);
  });
}

}  // extern "C"
