// Stored matrices (stored.h) outside of the decoding step: products of any number of rows, those of experts, single
// outputs, which are the embeddings of words, and new values of outputs.
#include <omp.h>

#include <algorithm>
#include <numeric>

#include "rounding.h"
#include "stored.h"

extern "C" void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float* a,
                            int lda, const float* b, int ldb, float beta, float* c, int ldc);

namespace {

using Dims = std::vector<int64_t>;

Dims WithLast(Dims shape, int64_t last) {
  shape.back() = last;
  return shape;
}

constexpr int64_t kFewRows = 16;   // up to here weights are widened in registers
constexpr int64_t kWideTiles = 8;  // tiles that are widened together

#ifdef __AVX512BF16__
constexpr int64_t kWideInputs = 768;  // and their inputs: 384 KiB, which stay in the core's cache
constexpr int kAtOnce = 6;            // rows of x that are multiplied together by two tiles
static_assert(kTile == 32 && kWideInputs % kMaxBlock == 0, "a row of a tile is two vectors");

// Pairs of two vectors' numbers, which are bfloat16 already.
inline __m512i Paired(Vector even, Vector odd) {
  return _mm512_or_si512(_mm512_srli_epi32((__m512i)even, 16), _mm512_and_si512((__m512i)odd, _mm512_set1_epi32(~0xFFFF)));
}

// Where the codes of a block of a tile are, or of all inputs where there are no blocks, and how many inputs it has.
template <typename Way>
struct BlocksOf {
  int64_t inputs, bytes;
  explicit BlocksOf(int64_t I) : inputs(Way::kScaled ? Block(I) : I), bytes(BlockBytes<Way>(inputs)) {}
};

// Inputs [from, end) of a tile, its codes as bfloat16: [pairs of inputs][kTile outputs][2]
template <typename Way>
void Pair(const Way& way, const uint8_t* tile, int64_t I, int64_t from, int64_t end, uint16_t* out) {
  const BlocksOf<Way> blocks(I);
  constexpr int kSteps = 2 / Way::kInputs;  // rows of bytes that are a pair
  for (int64_t q = from; q < end; q += 2, out += 2 * kTile) {
    const uint8_t* row = tile + q / blocks.inputs * blocks.bytes + (Way::kScaled ? kTile * 4 : 0) +
                         q % blocks.inputs / Way::kInputs * Way::kBytes;
    for (int64_t n = 0; n < kTile; n += kWidth) {
      Vector w[2] = {};
      for (int i = 0; i < kSteps; ++i)
        if (q + i < end) way.Read(row + i * Way::kBytes, n, reinterpret_cast<Vector(&)[Way::kInputs]>(w[i]));
      _mm512_storeu_si512(out + 2 * n, Paired(w[0], w[1]));
    }
  }
}

// y [R, C tiles] += or, at the first inputs, = x [R, I] w, with the scales of each block
template <typename Way, int R, int C>
void AddTiles(const uint16_t* const (&pairs)[C], const uint8_t* const (&tiles)[C], int64_t I, int64_t from, int64_t end,
              const uint16_t* x, int64_t x_step, float* y, int64_t y_step, int64_t num_outputs) {
  const BlocksOf<Way> blocks(I);
  for (int64_t begin = from, stop; begin < end; begin = stop) {
    stop = std::min(end, begin + blocks.inputs);
    __m512 sums[R][2 * C];
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < 2 * C; ++c) sums[r][c] = _mm512_setzero_ps();
    for (int64_t q = begin; q < stop; q += 2) {
      __m512bh w[2 * C];
      for (int c = 0; c < 2 * C; ++c) w[c] = (__m512bh)Words(pairs[c / 2] + (q - from) * kTile + c % 2 * 32);
      for (int r = 0; r < R; ++r) {
        const __m512bh both = TwoInputs(x + r * x_step + q);
        for (int c = 0; c < 2 * C; ++c) sums[r][c] = _mm512_dpbf16_ps(sums[r][c], w[c], both);
      }
    }
    for (int c = 0; c < 2 * C; ++c) {
      const int64_t left = std::clamp<int64_t>(num_outputs - c * 16, 0, 16);  // the last tile may not be full
      const __mmask16 mask = (1u << left) - 1;
      __m512 scale = _mm512_set1_ps(1.f);
      if constexpr (Way::kScaled)
        scale = _mm512_loadu_ps(tiles[c / 2] + begin / blocks.inputs * blocks.bytes + c % 2 * 64);
      for (int r = 0; r < R; ++r) {
        float* to = y + r * y_step + c * 16;
        const __m512 before = begin ? _mm512_maskz_loadu_ps(mask, to) : _mm512_setzero_ps();
        _mm512_mask_storeu_ps(to, mask, _mm512_fmadd_ps(sums[r][c], scale, before));
      }
    }
  }
}

// tiles [from, to) of y [M, N] = x [M, I] times a stored matrix, by the processor's products of bfloat16
template <typename Way>
void WideProduct(const Way& way, const Stored& w, int64_t M, const Rounded<uint16_t>& x, int64_t from, int64_t to,
                 float* y) {
  const int64_t per_tile = w.I / Block(w.I) * BlockBytes<Way>(Block(w.I));
  const int64_t most = std::min(kWideInputs, x.step) * kTile;
  std::vector<uint16_t> wide(kWideTiles * most);
  for (int64_t first = from; first < to; first += kWideTiles)
    for (int64_t q = 0; q < w.I; q += kWideInputs) {
      const int64_t count = std::min(kWideTiles, to - first), end = std::min(w.I, q + kWideInputs);
      const auto pairs = [&](int64_t t) { return wide.data() + t * most; };
      const auto bytes = [&](int64_t t) { return w.bytes + (first + t) * per_tile; };
      for (int64_t t = 0; t < count; ++t) Pair(way, bytes(t), w.I, q, end, pairs(t));
      for (int64_t m = 0; m < M; m += kAtOnce)
        WithRows(std::min<int64_t>(M - m, kAtOnce), [&](auto rows) {
          for (int64_t t = 0; t < count; t += 2) {
            float* out = y + m * w.N + (first + t) * kTile;
            const int64_t left = w.N - (first + t) * kTile;
            const uint16_t* given = x.row(m);
            if (t + 1 < count)
              AddTiles<Way, rows(), 2>({pairs(t), pairs(t + 1)}, {bytes(t), bytes(t + 1)}, w.I, q, end, given, x.step,
                                       out, w.N, left);
            else
              AddTiles<Way, rows(), 1>({pairs(t)}, {bytes(t)}, w.I, q, end, given, x.step, out, w.N, left);
          }
        });
    }
}
#else
constexpr int64_t kWideInputs = 512;  // and their inputs: 512 KiB, which stay in the core's cache
constexpr int kRowMajor = 101, kPlain = 111;

// tiles [from, to) of y [M, N] = x [M, I] times a stored matrix, by products with parts of it in float32
template <typename Way>
void WideProduct(const Way& way, const Stored& w, int64_t M, const Rounded<float>& x, int64_t from, int64_t to,
                 float* y) {
  std::vector<float> wide(std::min(kWideInputs, w.I) * kWideTiles * kTile), sums;
  for (int64_t tile = from; tile < to; tile += kWideTiles) {
    const int64_t count = std::min(kWideTiles, to - tile), width = count * kTile, first = tile * kTile;
    const bool is_whole = first + width <= w.N;  // else the last columns of the last tile are no outputs
    if (!is_whole) sums.resize(M * width);
    float* out = is_whole ? y + first : sums.data();
    const int64_t step = is_whole ? w.N : width;
    for (int64_t q = 0; q < w.I; q += kWideInputs) {
      const int64_t end = std::min(w.I, q + kWideInputs);
      Widen(way, w, tile, count, q, end, wide.data());
      cblas_sgemm(kRowMajor, kPlain, kPlain, M, width, end - q, 1.f, x.row(0) + q, x.step, wide.data(), width, q > 0,
                  out, step);
    }
    if (!is_whole)
      for (int64_t m = 0; m < M; ++m)
        std::copy(out + m * width, out + m * width + w.N - first, y + m * w.N + first);
  }
}
#endif

// y [M, N] = x [M, I] times a stored matrix
template <typename Way>
void Multiply(const Way& way, const Stored& w, int64_t M, const float* x, float* y) {
  const bool is_wide = M > kFewRows;
  Rounded<InputOf<Bf16>> given(is_wide ? M : 0, w.I);
#pragma omp parallel
  {
    const Share mine(w.tiles(), 1, omp_get_thread_num(), omp_get_num_threads());
    if (is_wide) {
#pragma omp for
      for (int64_t m = 0; m < M; ++m) given.Read(m, x + m * w.I);
      WideProduct(way, w, M, given, mine.from, mine.to, y);
    } else {
      StoredProduct(way, w, M, x, w.I, mine.from * kTile, std::min(w.N, mine.to * kTile), y);
    }
  }
}

// x [..., I] to [..., N]
std::vector<Tensor> Forward(const Tensor& x, const Tensor& stored, int64_t bits, std::vector<float> levels,
                            int64_t num_outputs) {
  Check(x, "x");
  const Form form(bits, levels);
  const int64_t I = x.shape().back(), M = x.numel() / I;
  const Stored w = ReadStored(stored, form, I, num_outputs, "the matrix");
  Tensor y = Floats(WithLast(x.shape(), num_outputs), x);
  WithForm(form, [&](auto way) { Multiply(way, w, M, x.data<float>(), y.data<float>()); });
  return {y};
}

// Grouped product [M, N]: rows x [M, I], `counts` [E] of them for each matrix of a stack; trailing rows give zeros.
std::vector<Tensor> Grouped(const Tensor& x, const Tensor& stored, const Tensor& counts, int64_t bits,
                            std::vector<float> levels, int64_t num_outputs) {
  Check(x, "x");
  PD_CHECK(counts.dtype() == paddle::DataType::INT64 && counts.is_contiguous(), "counts: contiguous int64");
  const Form form(bits, levels);
  const int64_t I = x.shape().back(), M = x.numel() / I, E = counts.numel();
  const int64_t* rows = counts.data<int64_t>();
  const bool none_below = std::all_of(rows, rows + E, [](int64_t n) { return n >= 0; });
  PD_CHECK(none_below && std::accumulate(rows, rows + E, int64_t{0}) <= M,
           "counts: of more rows than there are, or below 0");
  Stored w = ReadStored(stored, form, I, num_outputs, "the stack", E);
  Tensor y = Floats(WithLast(x.shape(), num_outputs), x);
  const float* px = x.data<float>();
  float* py = y.data<float>();
  WithForm(form, [&](auto way) {
    for (int64_t e = 0; e < E; px += rows[e] * I, py += rows[e] * num_outputs, ++e, w.bytes += stored.numel() / E)
      if (rows[e] > 0) Multiply(way, w, rows[e], px, py);
  });
  std::fill(py, y.data<float>() + y.numel(), 0.f);
  return {y};
}

// outputs `ids` [...] of a matrix [I, N]: [..., I]
std::vector<Tensor> Outputs(const Tensor& ids, const Tensor& stored, int64_t bits, std::vector<float> levels,
                            int64_t num_inputs, int64_t num_outputs) {
  PD_CHECK(ids.dtype() == paddle::DataType::INT64 && ids.is_contiguous(), "ids: contiguous int64");
  const Form form(bits, levels);
  const Stored w = ReadStored(stored, form, num_inputs, num_outputs, "the matrix");
  Dims shape = ids.shape();
  shape.push_back(num_inputs);
  Tensor y = paddle::experimental::empty(shape, paddle::DataType::FLOAT32, ids.place());
  const int64_t* wanted = ids.data<int64_t>();
  for (int64_t i = 0; i < ids.numel(); ++i)
    PD_CHECK(wanted[i] >= 0 && wanted[i] < w.N, "there is no output ", wanted[i]);
  float* py = y.data<float>();
  WithForm(form, [&](auto way) {
#pragma omp parallel
    {
      std::vector<float> tile(w.I * kTile);
#pragma omp for
      for (int64_t i = 0; i < ids.numel(); ++i) {
        Widen(way, w, wanted[i] / kTile, 1, 0, w.I, tile.data());
        for (int64_t q = 0; q < w.I; ++q) py[i * w.I + q] = tile[q * kTile + wanted[i] % kTile];
      }
    }
  });
  return {y};
}

// Rounds values [I, n], or transposed [n, I], into the outputs from `first` on of a matrix in bf16, in place.
std::vector<Tensor> Write(const Tensor& values, const Tensor& stored, int64_t num_outputs, int64_t first, bool turned) {
  Check(values, "values");
  const int64_t I = values.shape()[turned], n = values.shape()[!turned];
  const Stored w = ReadStored(stored, Form(16, {}), I, num_outputs, "the matrix");
  PD_CHECK(first >= 0 && first + n <= num_outputs, "there are no outputs from ", first, " to ", first + n);
  const float* from = values.data<float>();
  uint16_t* to = reinterpret_cast<uint16_t*>(const_cast<uint8_t*>(w.bytes));
#pragma omp parallel for
  for (int64_t tile = first / kTile; tile < (first + n + kTile - 1) / kTile; ++tile) {
    const int64_t begin = std::max(first, tile * kTile), end = std::min(first + n, (tile + 1) * kTile);
    for (int64_t q = 0; q < I; ++q) {
      uint16_t* row = to + (tile * I + q) * kTile - tile * kTile;
      for (int64_t o = begin; o < end; ++o) {
        const int64_t at = o - first;
        row[o] = rounding::Half(turned ? from[at * I + q] : from[q * n + at]);
      }
    }
  }
  return {stored};
}

std::vector<Dims> ProductShape(const Dims& x, const Dims&, int64_t, std::vector<float>, int64_t num_outputs) {
  return {WithLast(x, num_outputs)};
}
std::vector<Dims> GroupedShape(const Dims& x, const Dims&, const Dims&, int64_t, std::vector<float>,
                               int64_t num_outputs) {
  return {WithLast(x, num_outputs)};
}
std::vector<Dims> OutputsShape(const Dims& ids, const Dims&, int64_t, std::vector<float>, int64_t num_inputs, int64_t) {
  Dims found = ids;
  found.push_back(num_inputs);
  return {found};
}
using Types = std::vector<paddle::DataType>;
Types Floating(const paddle::DataType&, const paddle::DataType&) { return {paddle::DataType::FLOAT32}; }
Types GroupedType(const paddle::DataType&, const paddle::DataType&, const paddle::DataType&) {
  return {paddle::DataType::FLOAT32};
}
std::vector<Dims> StoredShape(const Dims&, const Dims& stored, int64_t, int64_t, bool) { return {stored}; }
Types StoredType(const paddle::DataType&, const paddle::DataType& stored) { return {stored}; }

}  // namespace

PD_BUILD_OP(llmsuite_stored_product)
    .Inputs({"x", "stored"})
    .Outputs({"y"})
    .Attrs({"bits: int64_t", "levels: std::vector<float>", "num_outputs: int64_t"})
    .SetKernelFn(PD_KERNEL(Forward))
    .SetInferShapeFn(PD_INFER_SHAPE(ProductShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(Floating));

PD_BUILD_OP(llmsuite_stored_grouped)
    .Inputs({"x", "stored", "counts"})
    .Outputs({"y"})
    .Attrs({"bits: int64_t", "levels: std::vector<float>", "num_outputs: int64_t"})
    .SetKernelFn(PD_KERNEL(Grouped))
    .SetInferShapeFn(PD_INFER_SHAPE(GroupedShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(GroupedType));

PD_BUILD_OP(llmsuite_stored_outputs)
    .Inputs({"ids", "stored"})
    .Outputs({"y"})
    .Attrs({"bits: int64_t", "levels: std::vector<float>", "num_inputs: int64_t", "num_outputs: int64_t"})
    .SetKernelFn(PD_KERNEL(Outputs))
    .SetInferShapeFn(PD_INFER_SHAPE(OutputsShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(Floating));

PD_BUILD_OP(llmsuite_stored_write)
    .Inputs({"values", "stored"})
    .Outputs({"same"})
    .Attrs({"num_outputs: int64_t", "first: int64_t", "turned: bool"})
    .SetKernelFn(PD_KERNEL(Write))
    .SetInferShapeFn(PD_INFER_SHAPE(StoredShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(StoredType));
