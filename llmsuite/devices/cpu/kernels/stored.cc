// Stored matrices (stored.h) outside of the decoding step: products of any number of rows, single outputs, which are
// the embeddings of words, and new values of outputs.
#include <omp.h>

#include "rounding.h"
#include "stored.h"

extern "C" void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float* a,
                            int lda, const float* b, int ldb, float beta, float* c, int ldc);

namespace {

constexpr int64_t kFewRows = 16;     // up to here weights are widened in registers
constexpr int64_t kWideTiles = 8;    // tiles that are widened at once
constexpr int64_t kWideInputs = 512;  // and their inputs: 512 KiB, which stay in the core's cache
constexpr int kRowMajor = 101, kPlain = 111;

// tiles [from, to) of y [M, N] = x [M, I] times a stored matrix, by products with parts of it in float32
template <typename Way>
void WideProduct(const Way& way, const Stored& w, int64_t M, const float* x, int64_t from, int64_t to, float* y) {
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
      cblas_sgemm(kRowMajor, kPlain, kPlain, M, width, end - q, 1.f, x + q, w.I, wide.data(), width, q > 0, out, step);
    }
    if (!is_whole)
      for (int64_t m = 0; m < M; ++m)
        std::copy(out + m * width, out + m * width + w.N - first, y + m * w.N + first);
  }
}

// x [M, I] to [M, N]
std::vector<Tensor> Forward(const Tensor& x, const Tensor& stored, int64_t bits, std::vector<float> levels,
                            int64_t num_outputs) {
  Check(x, "x");
  const Form form(bits, levels);
  const int64_t M = x.shape()[0], I = x.shape()[1];
  const Stored w = ReadStored(stored, form, I, num_outputs, "the matrix");
  Tensor y = Floats({M, num_outputs}, x);
  const float* px = x.data<float>();
  float* py = y.data<float>();
  WithForm(form, [&](auto way) {
#pragma omp parallel
    {
      const Share mine(w.tiles(), 1, omp_get_thread_num(), omp_get_num_threads());
      if (M <= kFewRows)
        StoredProduct(way, w, M, px, I, mine.from * kTile, std::min(w.N, mine.to * kTile), py);
      else
        WideProduct(way, w, M, px, mine.from, mine.to, py);
    }
  });
  return {y};
}

// outputs `ids` [M] of a matrix [I, N]: [M, I]
std::vector<Tensor> Outputs(const Tensor& ids, const Tensor& stored, int64_t bits, std::vector<float> levels,
                            int64_t num_inputs, int64_t num_outputs) {
  PD_CHECK(ids.dtype() == paddle::DataType::INT64 && ids.is_contiguous(), "ids: contiguous int64");
  const Form form(bits, levels);
  const Stored w = ReadStored(stored, form, num_inputs, num_outputs, "the matrix");
  Tensor y = paddle::experimental::empty({ids.numel(), num_inputs}, paddle::DataType::FLOAT32, ids.place());
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

// Rounds values [I, n], or turned [n, I], into the outputs from `first` on of a matrix in bf16, in place.
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

using Dims = std::vector<int64_t>;
std::vector<Dims> ProductShape(const Dims& x, const Dims&, int64_t, std::vector<float>, int64_t num_outputs) {
  return {{x[0], num_outputs}};
}
std::vector<Dims> OutputsShape(const Dims& ids, const Dims&, int64_t, std::vector<float>, int64_t num_inputs, int64_t) {
  return {{ids[0], num_inputs}};
}
using Types = std::vector<paddle::DataType>;
Types Floating(const paddle::DataType&, const paddle::DataType&) { return {paddle::DataType::FLOAT32}; }
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
