// Matrices as files hold them, `[n, k]` row by row, turned into panels.
#pragma once

#include "kernels.h"

namespace spill {

// The dtype of a matrix in a file.
enum Kind : int32_t { BF16 = 0, F32 = 1, F16 = 2 };

// Sixteen steps of one row as T computes with them, from element 0 of `row`.
template <class T>
u32x16 sixteen(const void* row, Kind kind);

inline f32x16 floats(const void* row, Kind kind) {
  typedef uint16_t u16x16 __attribute__((vector_size(32)));
  typedef _Float16 f16x16 __attribute__((vector_size(32)));
  if (kind == F32) return load<f32x16>(row);
  if (kind == F16) return __builtin_convertvector(load<f16x16>(row), f32x16);
  return (f32x16)(__builtin_convertvector(load<u16x16>(row), u32x16) << 16);
}

template <>
inline u32x16 sixteen<Wide>(const void* row, Kind kind) {
  return (u32x16)floats(row, kind);
}

template <>
inline u32x16 sixteen<Narrow>(const void* row, Kind kind) {
  if (kind == BF16) return load<u32x16>(row);
  uint16_t pairs[PANEL];
  const int half = LANES * (kind == F32 ? 4 : 2);
  float wide[PANEL];
  store(wide, floats(row, kind));
  store(wide + LANES, floats((const char*)row + half, kind));
  Narrow::of(wide, pairs);
  return load<u32x16>(pairs);
}

inline int width_of(Kind kind) { return kind == F32 ? 4 : 2; }

// Sixteen rows of sixteen lanes become columns: at distance 1, 2, 4 and 8, pairs of rows swap what the other needs.
inline void transpose(u32x16 (&rows)[LANES]) {
#define SPILL_SWAP(D)                                                                           \
  for (int i = 0; i < LANES; i++)                                                               \
    if (!(i & D)) {                                                                             \
      const u32x16 a = rows[i], b = rows[i + D];                                                \
      u32x16 low, high;                                                                         \
      for (int l = 0; l < LANES; l++) {                                                         \
        low[l] = uint32_t(l & D ? 16 + l - D : l);                                              \
        high[l] = uint32_t(l & D ? 16 + l : l + D);                                             \
      }                                                                                         \
      rows[i] = __builtin_shuffle(a, b, low);                                                   \
      rows[i + D] = __builtin_shuffle(a, b, high);                                              \
    }
  SPILL_SWAP(1) SPILL_SWAP(2) SPILL_SWAP(4) SPILL_SWAP(8)
#undef SPILL_SWAP
}

// A panel from the addresses of its rows; null rows are zero.
template <class T>
void pack_panel(const char* const (&rows)[PANEL], Kind kind, int64_t k, typename T::step* out) {
  const int64_t steps = steps_of(k, T::PER_STEP), bytes = k * width_of(kind);
  const int64_t each = LANES * T::PER_STEP * width_of(kind);  // bytes of sixteen steps
  for (int half = 0; half < PANEL; half += LANES)
    for (int64_t step = 0; step < steps; step += LANES) {
      u32x16 block[LANES] = {};
      for (int i = 0; i < LANES; i++) {
        const char* row = rows[half + i];
        const int64_t at = step / LANES * each;
        if (!row) continue;
        if (at + each <= bytes) {
          block[i] = sixteen<T>(row + at, kind);
        } else {
          char tail[LANES * 2 * 4] = {};
          std::memcpy(tail, row + at, bytes - at);
          block[i] = sixteen<T>(tail, kind);
        }
      }
      transpose(block);
      for (int64_t s = step; s < std::min(steps, step + LANES); s++) store(out + s * PANEL + half, block[s - step]);
    }
}

// Up to three matrices below one another; each begins a panel of its own where `apart`.
struct Parts {
  const void* data[3];
  int64_t rows[3];
  int32_t count, kind, apart;

  void rows_of(int64_t panel, int64_t k, const char* (&out)[PANEL]) const {
    const int64_t bytes = k * width_of(Kind(kind));
    int64_t first = panel * PANEL;
    for (int i = 0; i < PANEL; i++) out[i] = nullptr;
    for (int p = 0; p < count; p++) {
      const int64_t span = apart ? panels_of(rows[p]) * PANEL : rows[p];
      for (int i = 0; i < PANEL; i++) {
        const int64_t row = first + i;
        if (row >= 0 && row < rows[p]) out[i] = (const char*)data[p] + row * bytes;
      }
      first -= span;
    }
  }
};

template <class T>
const typename T::step* panel_of(const Matrix& w, int64_t panel, int which) {
  const int64_t steps = steps_of(w.k, T::PER_STEP);
  if (w.data) return (const typename T::step*)w.data + panel * steps * PANEL;
  static thread_local std::vector<typename T::step> made[2];
  if (int64_t(made[which].size()) < steps * PANEL) made[which].resize(steps * PANEL);
  const char* rows[PANEL];
  w.parts->rows_of(panel, w.k, rows);
  pack_panel<T>(rows, Kind(w.parts->kind), w.k, made[which].data());
  return made[which].data();
}

}  // namespace spill
