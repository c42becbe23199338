// The functions of a training pass that Python calls; `wide` chooses float32 (1) or bfloat16 (0).
#include "sequences.h"

using namespace spill;

namespace {

// f of the element type's kind; tensors are passed as void.
template <class F>
void by_kind(int32_t wide, const F& f) {
  if (wide) f(Wide{});
  else f(Narrow{});
}

template <class K>
using Element = typename K::element;

}  // namespace

extern "C" {

int32_t spill_training_version() { return 1; }

void spill_rms_norm(const Crew* crew, int32_t wide, const void* x, const float* weight, int64_t rows, int64_t n, float eps,
                    void* out, float* scales) {
  by_kind(wide, [&](auto kind) {
    using E = Element<decltype(kind)>;
    rms_norm<decltype(kind)>(*crew, (const E*)x, weight, rows, n, eps, (E*)out, scales);
  });
}

void spill_rms_norm_back(const Crew* crew, int32_t wide, const void* grad, const void* x, const float* weight,
                         const float* scales, int64_t rows, int64_t n, void* by_x) {
  by_kind(wide, [&](auto kind) {
    using E = Element<decltype(kind)>;
    rms_norm_back<decltype(kind)>(*crew, (const E*)grad, (const E*)x, weight, scales, rows, n, (E*)by_x);
  });
}

void spill_rotate(const Crew* crew, int32_t wide, const void* x, const void* cos, const void* sin, int64_t tokens,
                  const Turn* how, void* out) {
  by_kind(wide, [&](auto kind) {
    using E = Element<decltype(kind)>;
    rotate<decltype(kind)>(*crew, (const E*)x, (const E*)cos, (const E*)sin, tokens, *how, (E*)out);
  });
}

// `kind` is the activation: 0 SiLU, 1 GELU by tanh.
void spill_gated(const Crew* crew, int32_t wide, const void* gate_up, int64_t rows, int64_t n, int32_t activation, void* out) {
  by_kind(wide, [&](auto kind) {
    using E = Element<decltype(kind)>;
    gated<decltype(kind)>(*crew, (const E*)gate_up, rows, n, activation, (E*)out);
  });
}

void spill_gated_back(const Crew* crew, int32_t wide, const void* grad, const void* gate_up, int64_t rows, int64_t n,
                      int32_t activation, void* by) {
  by_kind(wide, [&](auto kind) {
    using E = Element<decltype(kind)>;
    gated_back<decltype(kind)>(*crew, (const E*)grad, (const E*)gate_up, rows, n, activation, (E*)by);
  });
}

void spill_sequences(const Crew* crew, int32_t wide, const Attend* how, const Sequences* all, const void* heads, void* out,
                     float* sums) {
  by_kind(wide, [&](auto kind) {
    using E = Element<decltype(kind)>;
    sequences_forward<decltype(kind)>(*crew, *how, *all, (const E*)heads, (E*)out, sums);
  });
}

void spill_sequences_back(const Crew* crew, int32_t wide, const Attend* how, const Sequences* all, const void* heads,
                          const void* out, const float* sums, const void* grad, void* by_heads) {
  by_kind(wide, [&](auto kind) {
    using E = Element<decltype(kind)>;
    sequences_back<decltype(kind)>(*crew, *how, *all, (const E*)heads, (const E*)out, sums, (const E*)grad, (E*)by_heads);
  });
}

}  // extern "C"
