// Products of consecutive rows with a matrix each, so many rows for each matrix: as operators, for programs, in which the
// numbers of rows are known to no Python.
//
// Shapes: x [N, I], w [E, I, O], counts [E] int64; y [N, O], zeros in rows that belong to no matrix, which are the last.
#include "common.h"
#include "rounding.h"

extern "C" void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float* a,
                            int lda, const float* b, int ldb, float beta, float* c, int ldc);

namespace {

using Dims = std::vector<int64_t>;
using Type = paddle::DataType;
constexpr int kRowMajor = 101, kPlain = 111, kTransposed = 112;

// A float32 tensor as products take it: itself, or with `rounds` each number rounded to bfloat16.
Tensor Operand(const Tensor& x, bool rounds) {
  if (!rounds) return x;
  Tensor y = Like(x);
  rounding::Each(x.data<float>(), y.data<float>(), x.numel(),
                 [](float value) { return rounding::Whole(rounding::Half(value)); });
  return y;
}

// `f(matrix, its first row, number of its rows)` for each matrix that has rows; returns the number of all rows.
template <typename F>
int64_t EachGroup(const Tensor& counts, int64_t rows, F f) {
  PD_CHECK(counts.dtype() == Type::INT64 && counts.is_contiguous(), "counts have to be int64, without gaps");
  const int64_t* of = counts.data<int64_t>();
  int64_t first = 0;
  for (int64_t i = 0; i < counts.numel(); ++i) {
    PD_CHECK(of[i] >= 0 && first + of[i] <= rows, "counts are of more rows than there are");
    if (of[i]) f(i, first, of[i]);
    first += of[i];
  }
  return first;
}

// Rows [N, K] times their matrices [E, K, M], or turned [E, M, K], to [N, M].
Tensor Multiply(const Tensor& x, const Tensor& w, const Tensor& counts, bool turned) {
  const int64_t rows = x.shape()[0], wide = x.shape()[1], to = w.shape()[turned ? 1 : 2], size = wide * to;
  Tensor y = Floats({rows, to}, x);
  const float *px = x.data<float>(), *pw = w.data<float>();
  float* py = y.data<float>();
  const int64_t used = EachGroup(counts, rows, [&](int64_t i, int64_t first, int64_t count) {
    cblas_sgemm(kRowMajor, kPlain, turned ? kTransposed : kPlain, count, to, wide, 1.f, px + first * wide, wide,
                pw + i * size, turned ? wide : to, 0.f, py + first * to, to);
  });
  std::fill(py + used * to, py + rows * to, 0.f);
  return y;
}

void CheckBoth(const Tensor& x, const Tensor& w) {
  Check(x, "x"), Check(w, "w");
  PD_CHECK(x.shape().size() == 2 && w.shape().size() == 3 && x.shape()[1] == w.shape()[1], "x and w do not fit");
}

std::vector<Tensor> Forward(const Tensor& x, const Tensor& w, const Tensor& counts, bool rounds) {
  CheckBoth(x, w);
  return {Multiply(Operand(x, rounds), Operand(w, rounds), counts, false)};
}

// The gradient of x alone, for matrices that are not trained.
std::vector<Tensor> RowsBackward(const Tensor& w, const Tensor& counts, const Tensor& d_y, bool rounds) {
  return {Multiply(Operand(d_y.contiguous(), rounds), Operand(w, rounds), counts, true)};
}

// All matrices get a gradient, also those without rows.
std::vector<Tensor> Backward(const Tensor& x, const Tensor& w, const Tensor& counts, const Tensor& d_y, bool rounds) {
  const Tensor given = Operand(d_y.contiguous(), rounds), kept = Operand(x, rounds);
  const int64_t rows = x.shape()[0], wide = x.shape()[1], to = w.shape()[2];
  Tensor d_w = Like(w);
  const float *px = kept.data<float>(), *pd = given.data<float>();
  float* pw = d_w.data<float>();
  std::fill_n(pw, d_w.numel(), 0.f);
  EachGroup(counts, rows, [&](int64_t i, int64_t first, int64_t count) {
    cblas_sgemm(kRowMajor, kTransposed, kPlain, wide, to, count, 1.f, px + first * wide, wide, pd + first * to, to,
                0.f, pw + i * wide * to, to);
  });
  return {Multiply(given, Operand(w, rounds), counts, true), d_w};
}

std::vector<Dims> Shapes(const Dims& x, const Dims& w, const Dims&, bool) { return {{x[0], w[2]}}; }
std::vector<Type> Types(const Type&, const Type&, const Type&) { return {Type::FLOAT32}; }
std::vector<Dims> RowsShapes(const Dims& w, const Dims&, const Dims& d_y) { return {{d_y[0], w[1]}}; }
std::vector<Type> RowsTypes(const Type&, const Type&, const Type&) { return {Type::FLOAT32}; }
std::vector<Dims> GradShapes(const Dims& x, const Dims& w, const Dims&, const Dims&) { return {x, w}; }
std::vector<Type> GradTypes(const Type&, const Type&, const Type&, const Type&) {
  return {Type::FLOAT32, Type::FLOAT32};
}

}  // namespace

PD_BUILD_OP(llmsuite_grouped_product)
    .Inputs({"x", "w", "counts"})
    .Outputs({"y"})
    .Attrs({"rounds: bool"})
    .SetKernelFn(PD_KERNEL(Forward))
    .SetInferShapeFn(PD_INFER_SHAPE(Shapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(Types));
PD_BUILD_GRAD_OP(llmsuite_grouped_product)
    .Inputs({"x", "w", "counts", paddle::Grad("y")})
    .Outputs({paddle::Grad("x"), paddle::Grad("w")})
    .Attrs({"rounds: bool"})
    .SetKernelFn(PD_KERNEL(Backward))
    .SetInferShapeFn(PD_INFER_SHAPE(GradShapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(GradTypes));

PD_BUILD_OP(llmsuite_grouped_rows)
    .Inputs({"x", "w", "counts"})
    .Outputs({"y"})
    .Attrs({"rounds: bool"})
    .SetKernelFn(PD_KERNEL(Forward))
    .SetInferShapeFn(PD_INFER_SHAPE(Shapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(Types));
PD_BUILD_GRAD_OP(llmsuite_grouped_rows)
    .Inputs({"w", "counts", paddle::Grad("y")})
    .Outputs({paddle::Grad("x")})
    .Attrs({"rounds: bool"})
    .SetKernelFn(PD_KERNEL(RowsBackward))
    .SetInferShapeFn(PD_INFER_SHAPE(RowsShapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(RowsTypes));
