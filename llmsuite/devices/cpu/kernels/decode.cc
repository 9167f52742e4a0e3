// One decoding step: one new token of each row through the whole decoder. Every weight is read once, in memory order,
// and all threads move from layer to layer together, with no operator launch and no thread wake-up in between. A row is
// summed in the same order whatever rows are beside it and however many threads there are.
//
// Shapes: B rows, D hidden, H query heads, J key-value heads, K head size, F intermediate, S columns of the cache,
// V vocabulary.
#include <linux/futex.h>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>

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

// A barrier that spins before it sleeps.
class Team {
 public:
  void Wait(int threads) {
    if (threads == 1) return;
    const uint32_t round = round_;
    if (++arrived_ == threads) {
      arrived_ = 0;
      ++round_;
      if (asleep_ > 0) Futex(FUTEX_WAKE_PRIVATE, INT32_MAX);
      return;
    }
    // the others are microseconds behind, unless they have no core to run on
    for (int spins = 0; spins < 2000; ++spins) {
      if (round_ != round) return;
      __builtin_ia32_pause();
    }
    ++asleep_;
    while (round_ == round) Futex(FUTEX_WAIT_PRIVATE, round);
    --asleep_;
  }

 private:
  void Futex(int operation, uint32_t value) { syscall(SYS_futex, &round_, operation, value, nullptr, nullptr, 0); }

  std::atomic<int> arrived_{0}, asleep_{0};
  std::atomic<uint32_t> round_{0};
};

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

// x / rms(x) * weight of rows of `size`
void Norm(int64_t rows, int64_t size, const float* x, const float* weight, float eps, float* y) {
  for (int64_t i = 0; i < rows; ++i, x += size, y += size) {
    float squares = 0.f;
#pragma omp simd reduction(+ : squares)
    for (int64_t j = 0; j < size; ++j) squares += x[j] * x[j];
    const float scale = 1.f / std::sqrt(squares / size + eps);
#pragma omp simd
    for (int64_t j = 0; j < size; ++j) y[j] = x[j] * scale * weight[j];
  }
}

void Turn(int64_t half, float* x, const float* cos, const float* sin) {
#pragma omp simd
  for (int64_t j = 0; j < half; ++j) {
    const float first = x[j], second = x[half + j];
    x[j] = first * cos[j] - second * sin[j];
    x[half + j] = second * cos[j] + first * sin[j];
  }
}

// out [K] = softmax(q k^T / sqrt(K)) v of one query and the columns [from, to) of k and v [S, K]
void Attend(int64_t K, const float* q, const float* k, const float* v, int64_t from, int64_t to, float* scores,
            float* out) {
  const float scale = 1.f / std::sqrt(static_cast<float>(K));
  float highest = -INFINITY, sum = 0.f;
  for (int64_t s = from; s < to; ++s) {
    float score = 0.f;
#pragma omp simd reduction(+ : score)
    for (int64_t i = 0; i < K; ++i) score += q[i] * k[s * K + i];
    scores[s] = score * scale;
    highest = std::max(highest, scores[s]);
  }
#pragma omp simd reduction(+ : sum)
  for (int64_t s = from; s < to; ++s) sum += scores[s] = Exp(scores[s] - highest);
  std::fill(out, out + K, 0.f);
  for (int64_t s = from; s < to; ++s) {
    const float weight = scores[s];
#pragma omp simd
    for (int64_t i = 0; i < K; ++i) out[i] += weight * v[s * K + i];
  }
  const float inverse = 1.f / sum;
#pragma omp simd
  for (int64_t i = 0; i < K; ++i) out[i] *= inverse;
}

struct Layer {
  const float *first_norm, *qkv, *bias = nullptr, *q_norm = nullptr, *k_norm = nullptr, *output, *second_norm, *gate_up,
                           *down;
  float *keys, *values;
};

struct Shape {
  int64_t B, D, H, J, K, F, S, V;
  int64_t heads() const { return H + 2 * J; }
};

// State shared by the threads.
struct Work {
  Shape s;
  float eps;
  int64_t filled;
  const float *cos, *sin;
  const int64_t* padding;
  float *x, *qkv, *attended, *inner, *added;
};

// Writes the new keys and values of key-value head j of row b into the cache, then attends its queries to it.
void AttendGroup(const Work& w, const Layer& layer, int64_t b, int64_t j, float* scores) {
  const Shape& s = w.s;
  const int64_t group = s.H / s.J, half = s.K / 2, at = (b * s.J + j) * s.S * s.K;
  const float *cos = w.cos + b * half, *sin = w.sin + b * half;
  float* heads = w.qkv + b * s.heads() * s.K;
  float *q = heads + j * group * s.K, *k = heads + (s.H + j) * s.K, *v = heads + (s.H + s.J + j) * s.K;
  if (layer.q_norm) Norm(group, s.K, q, layer.q_norm, w.eps, q), Norm(1, s.K, k, layer.k_norm, w.eps, k);
  for (int64_t g = 0; g < group; ++g) Turn(half, q + g * s.K, cos, sin);
  Turn(half, k, cos, sin);
  float *keys = layer.keys + at, *values = layer.values + at;
  std::copy(k, k + s.K, keys + w.filled * s.K), std::copy(v, v + s.K, values + w.filled * s.K);
  for (int64_t g = 0; g < group; ++g)
    Attend(s.K, q + g * s.K, keys, values, w.padding[b], w.filled + 1, scores,
           w.attended + (b * s.H + j * group + g) * s.K);
}

// x += this thread's part of a product
void Add(const Work& w, const Share& mine) {
  for (int64_t b = 0; b < w.s.B; ++b)
#pragma omp simd
    for (int64_t n = mine.from; n < mine.to; ++n) w.x[b * w.s.D + n] += w.added[b * w.s.D + n];
}

void Pass(const Work& w, const Layer& layer, Team& team, int thread, int threads, float* normed, float* scores) {
  const Shape& s = w.s;
  const int64_t width = s.heads() * s.K;
  Norm(s.B, s.D, w.x, layer.first_norm, w.eps, normed);
  const Share heads(width, kWidth, thread, threads);
  Product(s.B, normed, s.D, s.D, layer.qkv, width, heads.from, heads.to, w.qkv);
  if (layer.bias)
    for (int64_t b = 0; b < s.B; ++b)
      for (int64_t n = heads.from; n < heads.to; ++n) w.qkv[b * width + n] += layer.bias[n];
  team.Wait(threads);
  const Share groups(s.B * s.J, 1, thread, threads);
  for (int64_t i = groups.from; i < groups.to; ++i) AttendGroup(w, layer, i / s.J, i % s.J, scores);
  team.Wait(threads);
  const Share states(s.D, kWidth, thread, threads);
  Product(s.B, w.attended, s.H * s.K, s.H * s.K, layer.output, s.D, states.from, states.to, w.added);
  Add(w, states);
  team.Wait(threads);
  Norm(s.B, s.D, w.x, layer.second_norm, w.eps, normed);
  const Share inner(s.F, kWidth, thread, threads);
  // gate and up are adjacent, and so are their products; silu(gate) * up overwrites the gate's
  Product(s.B, normed, s.D, s.D, layer.gate_up, 2 * s.F, inner.from, inner.to, w.inner);
  Product(s.B, normed, s.D, s.D, layer.gate_up, 2 * s.F, s.F + inner.from, s.F + inner.to, w.inner);
  for (int64_t b = 0; b < s.B; ++b) {
    float* row = w.inner + b * 2 * s.F;
#pragma omp simd
    for (int64_t n = inner.from; n < inner.to; ++n) row[n] = row[n] / (1.f + Exp(-row[n])) * row[s.F + n];
  }
  team.Wait(threads);
  Product(s.B, w.inner, 2 * s.F, s.F, layer.down, s.D, states.from, states.to, w.added);
  Add(w, states);
  team.Wait(threads);
}

// Returns logits [B, V]; writes the new keys and values into column `filled` of the cache, in place.
std::vector<Tensor> Forward(const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& padding,
                            const std::vector<Tensor>& layers, const Tensor& norm, const Tensor& head,
                            const std::vector<Tensor>& cache, float eps, int64_t num_queries, bool has_bias,
                            bool has_head_norms, bool is_tied, int64_t filled) {
  const int64_t parts = 6 + has_bias + 2 * has_head_norms, num_layers = cache.size() / 2;
  PD_CHECK(static_cast<int64_t>(layers.size()) == parts * num_layers && num_layers > 0, "layers do not fit the cache");
  Check(x, "x"), Check(cos, "cos"), Check(sin, "sin"), Check(norm, "norm"), Check(head, "head");
  for (const Tensor& tensor : layers) Check(tensor, "a weight");
  for (const Tensor& tensor : cache) Check(tensor, "the cache");
  const auto& columns = cache[0].shape();
  Shape s{x.shape()[0], x.shape()[1], num_queries, columns[1], columns[3], layers.back().shape()[0], columns[2],
          head.shape()[is_tied ? 0 : 1]};
  PD_CHECK(filled < s.S && columns[0] == s.B && cos.numel() == s.B * s.K / 2, "the cache has no room");
  PD_CHECK(padding.dtype() == paddle::DataType::INT64 && padding.numel() == s.B, "padding: int64 [B]");
  std::vector<Layer> read(num_layers);
  for (int64_t i = 0; i < num_layers; ++i) {
    const Tensor* next = &layers[i * parts];
    const auto take = [&] { return (next++)->data<float>(); };
    Layer& layer = read[i];
    layer.first_norm = take(), layer.qkv = take();
    if (has_bias) layer.bias = take();
    if (has_head_norms) layer.q_norm = take(), layer.k_norm = take();
    layer.output = take(), layer.second_norm = take(), layer.gate_up = take(), layer.down = take();
    layer.keys = const_cast<float*>(cache[2 * i].data<float>());
    layer.values = const_cast<float*>(cache[2 * i + 1].data<float>());
  }
  Tensor logits = Floats({s.B, s.V}, x);
  std::vector<float> states(x.data<float>(), x.data<float>() + x.numel()), qkv(s.B * s.heads() * s.K),
      attended(s.B * s.H * s.K), inner(s.B * 2 * s.F), added(x.numel());
  const Work work{s, eps, filled, cos.data<float>(), sin.data<float>(), padding.data<int64_t>(),
                  states.data(), qkv.data(), attended.data(), inner.data(), added.data()};
  const float *last = norm.data<float>(), *words = head.data<float>();
  float* out = logits.data<float>();
  Team team;
#pragma omp parallel
  {
    const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
    std::vector<float> normed(s.B * s.D), scores(s.S);
    for (const Layer& layer : read) Pass(work, layer, team, thread, threads, normed.data(), scores.data());
    Norm(s.B, s.D, work.x, last, eps, normed.data());
    const Share mine(s.V, kWidth, thread, threads);
    if (is_tied)
      TurnedProduct(s.B, normed.data(), s.D, words, s.V, mine.from, mine.to, out);
    else
      Product(s.B, normed.data(), s.D, s.D, words, s.V, mine.from, mine.to, out);
  }
  return {logits};
}

using Dims = std::vector<int64_t>;
using ManyDims = std::vector<Dims>;
ManyDims Shapes(const Dims& x, const Dims&, const Dims&, const Dims&, const ManyDims&, const Dims&, const Dims& head,
                const ManyDims&, float, int64_t, bool, bool, bool is_tied, int64_t) {
  return {{x[0], head[is_tied ? 0 : 1]}};
}
using Type = paddle::DataType;
using Types = std::vector<Type>;
Types TypeOf(const Type& x, const Type&, const Type&, const Type&, const Types&, const Type&, const Type&,
             const Types&) {
  return {x};
}

}  // namespace

PD_BUILD_OP(llmsuite_next_logits)
    .Inputs({"x", "cos", "sin", "padding", paddle::Vec("layers"), "norm", "head", paddle::Vec("cache")})
    .Outputs({"logits"})
    .Attrs({"eps: float", "num_queries: int64_t", "has_bias: bool", "has_head_norms: bool", "is_tied: bool",
            "filled: int64_t"})
    .SetKernelFn(PD_KERNEL(Forward))
    .SetInferShapeFn(PD_INFER_SHAPE(Shapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(TypeOf));
