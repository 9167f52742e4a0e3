// A product whose inputs are rounded to bfloat16, with its gradients, for static programs, whose backward pass consists
// of operators and runs no Python. The same tensors are rounded, and saved for the backward pass, as in
// llmsuite/models/linear_ops.py.
//
// Shapes: x [..., I], w [I, O], or transposed [O, I]; y [..., O].
#pragma once
#include "rounding.h"

namespace linear {

using Tensor = paddle::Tensor;
using Dims = std::vector<int64_t>;
using Type = paddle::DataType;

// `multiply(a, b, transpose a, transpose b, is narrow)` of matrices in bfloat16, or in float32 to be rounded, to bfloat16
// where it is narrow, else float32; the leading dims of a, and of both where a is transposed, are rows. Returns y, as
// bfloat16 where it `gives` the rounded input of other products, and x rounded.
template <typename F>
std::vector<Tensor> Forward(const Tensor& x, const Tensor& w, bool transpose, bool gives, F multiply) {
  const Tensor kept = rounding::IsBf16(x) ? Tensor(x.impl()) : rounding::ToBf16(x);  // not x, which has a gradient
  return {multiply(kept, w, false, transpose, gives), kept};
}

// The gradients of x and w, of x rounded and the gradient of y. That of x is bfloat16 where x is, which it `takes`.
template <typename F>
std::vector<Tensor> Backward(const Tensor& kept, const Tensor& w, const Tensor& d_y, bool transpose, bool takes,
                             F multiply) {
  const Tensor given = rounding::ToBf16(d_y.contiguous());
  const Tensor d_w = transpose ? multiply(given, kept, true, false, false) : multiply(kept, given, true, false, false);
  return {multiply(given, w, false, !transpose, takes), d_w};
}

inline Type Operand(bool is_one) { return is_one ? Type::BFLOAT16 : Type::FLOAT32; }
inline std::vector<Dims> Shapes(const Dims& x, const Dims& w, bool transpose, bool, bool) {
  Dims y = x;
  y.back() = w[transpose ? 0 : 1];
  return {y, x};
}
inline std::vector<Type> Types(const Type&, const Type&, bool, bool, bool gives) {
  return {Operand(gives), Type::BFLOAT16};
}
inline std::vector<Dims> GradShapes(const Dims& kept, const Dims& w, const Dims&, bool, bool, bool) {
  return {kept, w};
}
inline std::vector<Type> GradTypes(const Type&, const Type&, const Type&, bool, bool takes, bool) {
  return {Operand(takes), Type::FLOAT32};
}

}  // namespace linear

// The operator of a name, and its gradient, by kernels with the signatures of Forward and Backward without `multiply`.
#define LLMSUITE_LINEAR(name, forward, backward)                                                                   \
  PD_BUILD_OP(name)                                                                                                \
      .Inputs({"x", "w"}).Outputs({"y", "kept"}).Attrs({"transpose: bool", "takes: bool", "gives: bool"})          \
      .SetKernelFn(PD_KERNEL(forward)).SetInferShapeFn(PD_INFER_SHAPE(linear::Shapes))                             \
      .SetInferDtypeFn(PD_INFER_DTYPE(linear::Types));                                                             \
  PD_BUILD_GRAD_OP(name)                                                                                           \
      .Inputs({"kept", "w", paddle::Grad("y")}).Outputs({paddle::Grad("x"), paddle::Grad("w")})                    \
      .Attrs({"transpose: bool", "takes: bool", "gives: bool"}).SetKernelFn(PD_KERNEL(backward))                   \
      .SetInferShapeFn(PD_INFER_SHAPE(linear::GradShapes)).SetInferDtypeFn(PD_INFER_DTYPE(linear::GradTypes))
