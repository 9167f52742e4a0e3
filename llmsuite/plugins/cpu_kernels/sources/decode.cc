// One decoding step: one new token of each row through all layers of a decoder. Every weight is read once, in memory
// order, and all threads move from layer to layer together, with no operator launch and no thread wake-up in between. A
// row is summed in the same order whatever other rows and however many threads there are. Keys and values are stored in
// float32 or bfloat16; all sums are float32. With `rounds` queries, keys, values and weights of attention are rounded
// to bfloat16 when they are computed, as in bf16_attention.cc, and with `rounds_inner` so are gate and up, as in
// training. With `rounds` queries and keys without biases and norms are also rounded before the rotation: training has
// them in bfloat16 there.
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

#include "rounding.h"
#include "stored.h"

namespace {

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
    // the others arrive within microseconds, unless they have no core to run on
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

void RoundAll(int64_t count, float* x) {
  for (int64_t i = 0; i < count; ++i) x[i] = rounding::Whole(rounding::Half(x[i]));
}

// out [K] = softmax(q k^T / sqrt(K)) v of one query and the columns [from, to) of k and v [S, K]
template <typename Element>
void Attend(int64_t K, const float* q, const Element* k, const Element* v, int64_t from, int64_t to, bool rounds,
            float* scores, float* out) {
  const float scale = 1.f / std::sqrt(static_cast<float>(K));
  float highest = -INFINITY, sum = 0.f;
  for (int64_t s = from; s < to; ++s) {
    float score = 0.f;
#pragma omp simd reduction(+ : score)
    for (int64_t i = 0; i < K; ++i) score += q[i] * rounding::Wide(k[s * K + i]);
    scores[s] = score * scale;
    highest = std::max(highest, scores[s]);
  }
#pragma omp simd reduction(+ : sum)
  for (int64_t s = from; s < to; ++s) sum += scores[s] = Exp(scores[s] - highest);
  if (rounds) RoundAll(to - from, scores + from);
  std::fill(out, out + K, 0.f);
  for (int64_t s = from; s < to; ++s) {
    const float weight = scores[s];
#pragma omp simd
    for (int64_t i = 0; i < K; ++i) out[i] += weight * rounding::Wide(v[s * K + i]);
  }
  const float inverse = 1.f / sum;
#pragma omp simd
  for (int64_t i = 0; i < K; ++i) out[i] *= inverse;
}

// A matrix of the decoder: float32 [I, N], or stored.
struct Matrix {
  const float* floats;
  Stored stored;
};

struct Layer {
  const float *first_norm, *bias = nullptr, *q_norm = nullptr, *k_norm = nullptr, *second_norm;
  Matrix qkv, output, gate_up, down;
  void *keys, *values;
};

struct Shape {
  int64_t B, D, H, J, K, F, S, V;
  int64_t heads() const { return H + 2 * J; }
};

// State shared by the threads.
struct Work {
  Shape s;
  Form form;  // format of the matrices of layers; 32 bits: float32
  float eps;
  bool rounds, rounds_inner;
  int64_t filled;
  const float *cos, *sin;
  const int64_t* padding;
  float *x, *qkv, *attended, *inner, *added;
};

// Writes the new keys and values of key-value head j of row b into the cache, then attends its queries to it.
template <typename Element>
void AttendGroup(const Work& w, const Layer& layer, int64_t b, int64_t j, float* scores) {
  const Shape& s = w.s;
  const int64_t group = s.H / s.J, half = s.K / 2, at = (b * s.J + j) * s.S * s.K;
  const float *cos = w.cos + b * half, *sin = w.sin + b * half;
  float* heads = w.qkv + b * s.heads() * s.K;
  float *q = heads + j * group * s.K, *k = heads + (s.H + j) * s.K, *v = heads + (s.H + s.J + j) * s.K;
  if (layer.q_norm) Norm(group, s.K, q, layer.q_norm, w.eps, q), Norm(1, s.K, k, layer.k_norm, w.eps, k);
  if (w.rounds && !layer.bias && !layer.q_norm) RoundAll(group * s.K, q), RoundAll(s.K, k);
  for (int64_t g = 0; g < group; ++g) Turn(half, q + g * s.K, cos, sin);
  Turn(half, k, cos, sin);
  if (w.rounds) RoundAll(group * s.K, q), RoundAll(s.K, k), RoundAll(s.K, v);
  Element *keys = static_cast<Element*>(layer.keys) + at, *values = static_cast<Element*>(layer.values) + at;
  for (int64_t i = 0; i < s.K; ++i) rounding::Put(k[i], keys[w.filled * s.K + i]), rounding::Put(v[i], values[w.filled * s.K + i]);
  float* out = w.attended + (b * s.H + j * group) * s.K;
  for (int64_t g = 0; g < group; ++g)
    Attend(s.K, q + g * s.K, keys, values, w.padding[b], w.filled + 1, w.rounds, scores,
           out + g * s.K);
}

// columns [from, to) of y [B, N] = x [B, I] times a matrix; rows of x begin `x_step` apart
void Times(const Form& form, const Matrix& w, int64_t B, const float* x, int64_t x_step, int64_t from, int64_t to,
           float* y) {
  if (form.bits == 32) return Product(B, x, x_step, w.stored.I, w.floats, w.stored.N, from, to, y);
  WithForm(form, [&](auto way) { StoredProduct(way, w.stored, B, x, x_step, from, to, y); });
}

// The unit of work that threads divide among them: a vector of outputs, or a tile.
int64_t Unit(const Form& form) { return form.bits == 32 ? kWidth : kTile; }

// x += this thread's part of a product
void Add(const Work& w, const Share& mine) {
  for (int64_t b = 0; b < w.s.B; ++b)
#pragma omp simd
    for (int64_t n = mine.from; n < mine.to; ++n) w.x[b * w.s.D + n] += w.added[b * w.s.D + n];
}

template <typename Element>
void Pass(const Work& w, const Layer& layer, Team& team, int thread, int threads, float* normed, float* scores) {
  const Shape& s = w.s;
  const int64_t width = s.heads() * s.K;
  Norm(s.B, s.D, w.x, layer.first_norm, w.eps, normed);
  const int64_t unit = Unit(w.form);
  const Share heads(width, unit, thread, threads);
  Times(w.form, layer.qkv, s.B, normed, s.D, heads.from, heads.to, w.qkv);
  if (layer.bias)
    for (int64_t b = 0; b < s.B; ++b)
      for (int64_t n = heads.from; n < heads.to; ++n) w.qkv[b * width + n] += layer.bias[n];
  team.Wait(threads);
  const Share groups(s.B * s.J, 1, thread, threads);
  for (int64_t i = groups.from; i < groups.to; ++i) AttendGroup<Element>(w, layer, i / s.J, i % s.J, scores);
  team.Wait(threads);
  const Share states(s.D, unit, thread, threads);
  Times(w.form, layer.output, s.B, w.attended, s.H * s.K, states.from, states.to, w.added);
  Add(w, states);
  team.Wait(threads);
  Norm(s.B, s.D, w.x, layer.second_norm, w.eps, normed);
  const Share inner(s.F, unit, thread, threads);
  // gate and up are adjacent, and so are their products; silu(gate) * up overwrites the gate's
  Times(w.form, layer.gate_up, s.B, normed, s.D, inner.from, inner.to, w.inner);
  Times(w.form, layer.gate_up, s.B, normed, s.D, s.F + inner.from, s.F + inner.to, w.inner);
  for (int64_t b = 0; b < s.B; ++b) {
    float* row = w.inner + b * 2 * s.F;
    if (w.rounds_inner)
      for (float* part : {row, row + s.F}) RoundAll(inner.to - inner.from, part + inner.from);
#pragma omp simd
    for (int64_t n = inner.from; n < inner.to; ++n) row[n] = row[n] / (1.f + Exp(-row[n])) * row[s.F + n];
  }
  team.Wait(threads);
  Times(w.form, layer.down, s.B, w.inner, 2 * s.F, states.from, states.to, w.added);
  Add(w, states);
  team.Wait(threads);
}

Matrix ReadMatrix(const Tensor& tensor, const Form& form, int64_t I, int64_t N, const char* name) {
  if (form.bits != 32) return {nullptr, ReadStored(tensor, form, I, N, name)};
  Check(tensor, name);
  PD_CHECK(tensor.numel() == I * N, name, " has another size");
  return {tensor.data<float>(), {nullptr, I, N}};
}

std::vector<Layer> ReadLayers(const std::vector<Tensor>& layers, const std::vector<Tensor>& cache, const Shape& s,
                              const Form& form, bool has_bias, bool has_head_norms) {
  const int64_t parts = 6 + has_bias + 2 * has_head_norms, num_layers = cache.size() / 2;
  PD_CHECK(static_cast<int64_t>(layers.size()) == parts * num_layers && num_layers > 0, "layers do not fit the cache");
  for (const Tensor& tensor : cache)
    PD_CHECK(tensor.is_contiguous() && tensor.dtype() == cache[0].dtype(), "the cache: alike, and without gaps");
  std::vector<Layer> read(num_layers);
  const Tensor* next = layers.data();
  const auto floats = [&] { return Check(*next, "a weight"), (next++)->data<float>(); };
  const auto matrix = [&](int64_t I, int64_t N) { return ReadMatrix(*next++, form, I, N, "a matrix"); };
  for (int64_t i = 0; i < num_layers; ++i) {
    Layer& layer = read[i];
    layer.first_norm = floats(), layer.qkv = matrix(s.D, s.heads() * s.K);
    if (has_bias) layer.bias = floats();
    if (has_head_norms) layer.q_norm = floats(), layer.k_norm = floats();
    layer.output = matrix(s.H * s.K, s.D), layer.second_norm = floats();
    layer.gate_up = matrix(s.D, 2 * s.F), layer.down = matrix(s.F, s.D);
    layer.keys = const_cast<void*>(cache[2 * i].data());
    layer.values = const_cast<void*>(cache[2 * i + 1].data());
  }
  return read;
}

// Returns logits [B, V]; writes the new keys and values into column `filled` of the cache, in place.
std::vector<Tensor> Forward(const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& padding,
                            const std::vector<Tensor>& layers, const Tensor& norm, const Tensor& head,
                            const std::vector<Tensor>& cache, float eps, int64_t num_queries, int64_t num_inner,
                            int64_t num_words, bool has_bias, bool has_head_norms, bool is_tied, int64_t bits,
                            int64_t head_bits, std::vector<float> levels, bool rounds, bool rounds_inner,
                            int64_t filled) {
  Check(x, "x"), Check(cos, "cos"), Check(sin, "sin"), Check(norm, "norm");
  const auto& columns = cache.at(0).shape();
  const Form form(bits, levels), head_form(head_bits, levels);
  const Shape s{x.shape()[0], x.shape()[1], num_queries, columns[1], columns[3], num_inner, columns[2], num_words};
  PD_CHECK(filled < s.S && columns[0] == s.B && cos.numel() == s.B * s.K / 2, "the cache has no room");
  PD_CHECK(padding.dtype() == paddle::DataType::INT64 && padding.numel() == s.B, "padding: int64 [B]");
  for (int64_t b = 0; b < s.B; ++b)  // a row that sees nothing would have the mean of nothing
    PD_CHECK(0 <= padding.data<int64_t>()[b] && padding.data<int64_t>()[b] <= filled, "padding is beyond the cache");
  const bool is_narrow = rounding::IsBf16(cache.at(0));
  const std::vector<Layer> read = ReadLayers(layers, cache, s, form, has_bias, has_head_norms);
  const Matrix words = ReadMatrix(head, head_form, s.D, s.V, "head");
  Tensor logits = Floats({s.B, s.V}, x);
  std::vector<float> states(x.data<float>(), x.data<float>() + x.numel()), qkv(s.B * s.heads() * s.K),
      attended(s.B * s.H * s.K), inner(s.B * 2 * s.F), added(x.numel());
  const Work work{s, form, eps, rounds, rounds_inner, filled, cos.data<float>(), sin.data<float>(),
                  padding.data<int64_t>(), states.data(), qkv.data(), attended.data(), inner.data(), added.data()};
  const float* last = norm.data<float>();
  float* out = logits.data<float>();
  Team team;
#pragma omp parallel
  {
    const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
    std::vector<float> normed(s.B * s.D), scores(s.S);
    const auto pass = is_narrow ? Pass<uint16_t> : Pass<float>;
    for (const Layer& layer : read) pass(work, layer, team, thread, threads, normed.data(), scores.data());
    Norm(s.B, s.D, work.x, last, eps, normed.data());
    const Share mine(s.V, Unit(head_form), thread, threads);
    if (is_tied && head_bits == 32)
      TurnedProduct(s.B, normed.data(), s.D, words.floats, s.V, mine.from, mine.to, out);
    else
      Times(head_form, words, s.B, normed.data(), s.D, mine.from, mine.to, out);
  }
  return {logits};
}

using Dims = std::vector<int64_t>;
using ManyDims = std::vector<Dims>;
ManyDims Shapes(const Dims& x, const Dims&, const Dims&, const Dims&, const ManyDims&, const Dims&, const Dims&,
                const ManyDims&, float, int64_t, int64_t, int64_t num_words, bool, bool, bool, int64_t, int64_t,
                std::vector<float>, bool, bool, int64_t) {
  return {{x[0], num_words}};
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
    .Attrs({"eps: float", "num_queries: int64_t", "num_inner: int64_t", "num_words: int64_t", "has_bias: bool",
            "has_head_norms: bool", "is_tied: bool", "bits: int64_t", "head_bits: int64_t",
            "levels: std::vector<float>", "rounds: bool", "rounds_inner: bool",
            "filled: int64_t"})
    .SetKernelFn(PD_KERNEL(Forward))
    .SetInferShapeFn(PD_INFER_SHAPE(Shapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(TypeOf));
