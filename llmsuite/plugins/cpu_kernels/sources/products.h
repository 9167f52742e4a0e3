// Products of a few rows with a float32 matrix: each weight is read once, in the order in which it is in memory. A row is
// summed in the same order whatever other rows there are.
#pragma once
#include <algorithm>
#include <type_traits>

#include "common.h"

namespace {

#ifdef __AVX512F__
constexpr int kWidth = 16;
#else
constexpr int kWidth = 8;
#endif
typedef float Vector __attribute__((vector_size(kWidth * 4), aligned(4), may_alias));

constexpr int kRows = 8;   // rows that share one read of a matrix
constexpr int kDepth = 8;  // rows of a matrix accumulated in registers

inline const Vector& Load(const float* p) { return *reinterpret_cast<const Vector*>(p); }
inline Vector& Load(float* p) { return *reinterpret_cast<Vector*>(p); }

struct Share {
  int64_t from, to;
  Share(int64_t count, int64_t unit, int thread, int threads) {
    const int64_t units = (count + unit - 1) / unit;
    from = std::min(count, units * thread / threads * unit), to = std::min(count, units * (thread + 1) / threads * unit);
  }
};

// y[r, n] += sum over q < Q of x[r, q] w[q, n], for R rows and columns [from, to)
template <int R, int Q>
void AddRows(const float* x, int64_t x_step, const float* w, int64_t w_step, int64_t from, int64_t to, float* y,
             int64_t y_step) {
  int64_t n = from;
  for (; n + kWidth <= to; n += kWidth) {
    Vector sums[R];
    for (int r = 0; r < R; ++r) sums[r] = Load(y + r * y_step + n);
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q) {
      const Vector weight = Load(w + q * w_step + n);
      __builtin_prefetch(w + (q + Q) * w_step + n);
      for (int r = 0; r < R; ++r) sums[r] += weight * x[r * x_step + q];
    }
    for (int r = 0; r < R; ++r) Load(y + r * y_step + n) = sums[r];
  }
  for (; n < to; ++n)
    for (int r = 0; r < R; ++r) {
      float sum = y[r * y_step + n];
      for (int q = 0; q < Q; ++q) sum += x[r * x_step + q] * w[q * w_step + n];
      y[r * y_step + n] = sum;
    }
}

// y[r, n] = sum over d < size of x[r, d] w[n, d], for R rows and n in [from, to)
template <int R>
void Dots(const float* x, int64_t size, const float* w, int64_t from, int64_t to, float* y, int64_t y_step) {
  for (int64_t n = from; n < to; ++n) {
    const float* row = w + n * size;
    Vector sums[R];
    for (int r = 0; r < R; ++r) sums[r] = Vector{};
    int64_t d = 0;
    for (; d + kWidth <= size; d += kWidth) {
      const Vector weight = Load(row + d);
      __builtin_prefetch(row + d + 2 * size);
      for (int r = 0; r < R; ++r) sums[r] += weight * Load(x + r * size + d);
    }
    for (int r = 0; r < R; ++r) {
      float sum = 0.f;
      for (int i = 0; i < kWidth; ++i) sum += sums[r][i];
      for (int64_t rest = d; rest < size; ++rest) sum += x[r * size + rest] * row[rest];
      y[r * y_step + n] = sum;
    }
  }
}

// Calls f with the number of rows as a compile-time constant.
template <typename F>
void WithRows(int64_t rows, F f) {
  switch (rows) {
    case 1: return f(std::integral_constant<int, 1>{});
    case 2: return f(std::integral_constant<int, 2>{});
    case 3: return f(std::integral_constant<int, 3>{});
    case 4: return f(std::integral_constant<int, 4>{});
    case 5: return f(std::integral_constant<int, 5>{});
    case 6: return f(std::integral_constant<int, 6>{});
    case 7: return f(std::integral_constant<int, 7>{});
    default: return f(std::integral_constant<int, 8>{});
  }
}

// columns [from, to) of y [B, N] = x [B, D] w [D, N]; rows of x begin `x_step` apart
[[gnu::noinline]] void Product(int64_t B, const float* x, int64_t x_step, int64_t D, const float* w, int64_t N,
                               int64_t from, int64_t to, float* y) {
  for (int64_t b = 0; b < B; ++b) std::fill(y + b * N + from, y + b * N + to, 0.f);
  for (int64_t d = 0; d < D; d += kDepth)
    for (int64_t b = 0; b < B; b += kRows)
      WithRows(B - b, [&](auto rows) {
        const float* given = x + b * x_step;
        if (d + kDepth <= D) return AddRows<rows(), kDepth>(given + d, x_step, w + d * N, N, from, to, y + b * N, N);
        for (int64_t rest = d; rest < D; ++rest)
          for (int64_t r = 0; r < rows(); ++r)
            AddRows<1, 1>(given + r * x_step + rest, x_step, w + rest * N, N, from, to, y + (b + r) * N, N);
      });
}

// n in [from, to) of y [B, N] = x [B, D] w^T, w [N, D]
void TurnedProduct(int64_t B, const float* x, int64_t D, const float* w, int64_t N, int64_t from, int64_t to,
                   float* y) {
  constexpr int64_t kBlock = 16;  // rows of w kept in cache for several rows of x
  for (int64_t n = from; n < to; n += kBlock)
    for (int64_t b = 0; b < B; b += kRows)
      WithRows(B - b, [&](auto rows) { Dots<rows()>(x + b * D, D, w, n, std::min(n + kBlock, to), y + b * N, N); });
}

}  // namespace
