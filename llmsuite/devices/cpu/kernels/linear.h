// A product whose inputs are rounded to bfloat16, with its gradients, for programs: on their way back these have operators
// and no Python. What is rounded, and kept for the way back, is as in llmsuite/models/products.py.
//
// Shapes: x [..., I], w [I, O], or transposed [O, I]; y [..., O].
#pragma once
#include "rounding.h"

namespace linear {

using Tensor = paddle::Tensor;
using Dims = std::vector<int64_t>;
using Type = paddle::DataType;

// `multiply(a, b, transpose a, transpose b)` of matrices in bfloat16, or in float32 to be rounded; the leading dims of a,
// and of both where a is transposed, are rows. Returns y, and x rounded.
template <typename F>
std::vector<Tensor> Forward(const Tensor& x, const Tensor& w, bool transpose, F multiply) {
  const Tensor kept = rounding::ToBf16(x);
  return {multiply(kept, w, false, transpose), kept};
}

// The gradients of x and w, of x rounded and the gradient of y.
template <typename F>
std::vector<Tensor> Backward(const Tensor& kept, const Tensor& w, const Tensor& d_y, bool transpose, F multiply) {
  const Tensor given = rounding::ToBf16(d_y.contiguous());
  const Tensor d_w = transpose ? multiply(given, kept, true, false) : multiply(kept, given, true, false);
  return {multiply(given, w, false, !transpose), d_w};
}

inline std::vector<Dims> Shapes(const Dims& x, const Dims& w, bool transpose) {
  Dims y = x;
  y.back() = w[transpose ? 0 : 1];
  return {y, x};
}
inline std::vector<Type> Types(const Type&, const Type&) { return {Type::FLOAT32, Type::BFLOAT16}; }
inline std::vector<Dims> GradShapes(const Dims& kept, const Dims& w, const Dims&) { return {kept, w}; }
inline std::vector<Type> GradTypes(const Type&, const Type&, const Type&) { return {Type::FLOAT32, Type::FLOAT32}; }

}  // namespace linear

// The operator of a name, and its gradient, by kernels with the signatures of Forward and Backward without `multiply`.
#define LLMSUITE_LINEAR(name, forward, backward)                                                                   \
  PD_BUILD_OP(name)                                                                                                \
      .Inputs({"x", "w"}).Outputs({"y", "kept"}).Attrs({"transpose: bool"}).SetKernelFn(PD_KERNEL(forward))         \
      .SetInferShapeFn(PD_INFER_SHAPE(linear::Shapes)).SetInferDtypeFn(PD_INFER_DTYPE(linear::Types));             \
  PD_BUILD_GRAD_OP(name)                                                                                           \
      .Inputs({"kept", "w", paddle::Grad("y")}).Outputs({paddle::Grad("x"), paddle::Grad("w")})                    \
      .Attrs({"transpose: bool"}).SetKernelFn(PD_KERNEL(backward))                                                 \
      .SetInferShapeFn(PD_INFER_SHAPE(linear::GradShapes)).SetInferDtypeFn(PD_INFER_DTYPE(linear::GradTypes))
