// Grouped products: consecutive rows times one matrix of a stack. As operators, for static programs, in which Python
// does not know the numbers of rows.
//
// Shapes: x [N, I], w [E, I, O], counts [E] int64; y [N, O], zeros in rows that belong to no matrix, which are the last.
#pragma once
#include <algorithm>

#include "common.h"

namespace grouped {

using Dims = std::vector<int64_t>;
using Type = paddle::DataType;

// A matrix in a tensor, from an element on; if it is turned, its transpose is stored.
struct Matrix {
  const Tensor& tensor;
  int64_t from;
  bool is_turned;
};

// `f(matrix, its first row, number of its rows)` for each matrix that has rows; returns the number of all rows.
template <typename F>
int64_t EachGroup(const Tensor& counts, int64_t rows, F f) {
  PD_CHECK(counts.dtype() == Type::INT64 && counts.is_contiguous(), "counts have to be int64, without gaps");
  const int64_t* of = counts.data<int64_t>();
  int64_t first = 0;
  for (int64_t i = 0; i < counts.numel(); ++i) {
    PD_CHECK(of[i] >= 0 && of[i] <= rows - first, "counts are of more rows than there are");
    if (of[i]) f(i, first, of[i]);
    first += of[i];
  }
  return first;
}

// The operators with products of one kind. Its `Rows(x)` and `Matrices(w)` are float32 tensors as a product takes them,
// and `Multiply(m, n, k, a, b, c)` writes c [m, n] = a [m, k] b [k, n].
template <typename Kind>
struct Products {
  // Rows [N, K] times their matrices [E, K, M], or transposed [E, M, K], to [N, M].
  static Tensor Times(const Tensor& x, const Tensor& w, const Tensor& counts, bool turned) {
    const int64_t rows = x.shape()[0], wide = x.shape()[1], to = w.shape()[turned ? 1 : 2], size = wide * to;
    Tensor y = paddle::experimental::empty({rows, to}, Type::FLOAT32, x.place());
    float* py = y.data<float>();
    if (size == 0) return std::fill_n(py, y.numel(), 0.f), y;
    const int64_t used = EachGroup(counts, rows, [&](int64_t i, int64_t first, int64_t count) {
      Kind::Multiply(count, to, wide, {x, first * wide, false}, {w, i * size, turned}, py + first * to);
    });
    std::fill(py + used * to, py + rows * to, 0.f);
    return y;
  }

  static std::vector<Tensor> Forward(const Tensor& x, const Tensor& w, const Tensor& counts) {
    Check(x, "x"), Check(w, "w");
    PD_CHECK(x.shape().size() == 2 && w.shape().size() == 3 && x.shape()[1] == w.shape()[1], "x and w do not fit");
    PD_CHECK(counts.numel() == w.shape()[0], "as many counts are needed as matrices");
    return {Times(Kind::Rows(x), Kind::Matrices(w), counts, false)};
  }

  // The gradient of x alone, for matrices that are not trained.
  static std::vector<Tensor> RowsBackward(const Tensor& w, const Tensor& counts, const Tensor& d_y) {
    return {Times(Kind::Rows(d_y.contiguous()), Kind::Matrices(w), counts, true)};
  }

  // All matrices get a gradient, also those without rows.
  static std::vector<Tensor> Backward(const Tensor& x, const Tensor& w, const Tensor& counts, const Tensor& d_y) {
    const Tensor given = Kind::Rows(d_y.contiguous()), kept = Kind::Rows(x);
    const int64_t rows = x.shape()[0], wide = x.shape()[1], to = w.shape()[2];
    Tensor d_w = Like(w);
    float* pw = d_w.data<float>();
    std::fill_n(pw, d_w.numel(), 0.f);
    if (d_w.numel()) EachGroup(counts, rows, [&](int64_t i, int64_t first, int64_t count) {
      Kind::Multiply(wide, to, count, {kept, first * wide, true}, {given, first * to, false}, pw + i * wide * to);
    });
    return {Times(given, Kind::Matrices(w), counts, true), d_w};
  }
};

inline std::vector<Dims> Shapes(const Dims& x, const Dims& w, const Dims&) { return {{x[0], w[2]}}; }
inline std::vector<Type> Types(const Type&, const Type&, const Type&) { return {Type::FLOAT32}; }
inline std::vector<Dims> RowsShapes(const Dims& w, const Dims&, const Dims& d_y) { return {{d_y[0], w[1]}}; }
inline std::vector<Type> RowsTypes(const Type&, const Type&, const Type&) { return {Type::FLOAT32}; }
inline std::vector<Dims> GradShapes(const Dims& x, const Dims& w, const Dims&, const Dims&) { return {x, w}; }
inline std::vector<Type> GradTypes(const Type&, const Type&, const Type&, const Type&) {
  return {Type::FLOAT32, Type::FLOAT32};
}

}  // namespace grouped

// The operators of a name, of trained matrices and of frozen ones, with Forward, Backward and RowsBackward of a kind.
#define LLMSUITE_GROUPED(name, kind)                                                                               \
  std::vector<Tensor> kind##Forward(const Tensor& x, const Tensor& w, const Tensor& counts) {                       \
    return grouped::Products<kind>::Forward(x, w, counts);                                                         \
  }                                                                                                                \
  std::vector<Tensor> kind##Backward(const Tensor& x, const Tensor& w, const Tensor& counts, const Tensor& d_y) {   \
    return grouped::Products<kind>::Backward(x, w, counts, d_y);                                                   \
  }                                                                                                                \
  std::vector<Tensor> kind##RowsBackward(const Tensor& w, const Tensor& counts, const Tensor& d_y) {                \
    return grouped::Products<kind>::RowsBackward(w, counts, d_y);                                                  \
  }                                                                                                                \
  PD_BUILD_OP(name##_product)                                                                                      \
      .Inputs({"x", "w", "counts"}).Outputs({"y"}).SetKernelFn(PD_KERNEL(kind##Forward))                            \
      .SetInferShapeFn(PD_INFER_SHAPE(grouped::Shapes)).SetInferDtypeFn(PD_INFER_DTYPE(grouped::Types));            \
  PD_BUILD_GRAD_OP(name##_product)                                                                                 \
      .Inputs({"x", "w", "counts", paddle::Grad("y")}).Outputs({paddle::Grad("x"), paddle::Grad("w")})              \
      .SetKernelFn(PD_KERNEL(kind##Backward)).SetInferShapeFn(PD_INFER_SHAPE(grouped::GradShapes))                  \
      .SetInferDtypeFn(PD_INFER_DTYPE(grouped::GradTypes));                                                        \
  PD_BUILD_OP(name##_rows)                                                                                         \
      .Inputs({"x", "w", "counts"}).Outputs({"y"}).SetKernelFn(PD_KERNEL(kind##Forward))                            \
      .SetInferShapeFn(PD_INFER_SHAPE(grouped::Shapes)).SetInferDtypeFn(PD_INFER_DTYPE(grouped::Types));            \
  PD_BUILD_GRAD_OP(name##_rows)                                                                                    \
      .Inputs({"w", "counts", paddle::Grad("y")}).Outputs({paddle::Grad("x")})                                      \
      .SetKernelFn(PD_KERNEL(kind##RowsBackward)).SetInferShapeFn(PD_INFER_SHAPE(grouped::RowsShapes))              \
      .SetInferDtypeFn(PD_INFER_DTYPE(grouped::RowsTypes));
