// Products of matrices by instructions for bfloat16, with float32 sums:
//   llmsuite_bf16_product   the sum of the products of pairs of matrices, each float32 (rounded here) or bfloat16
//                           -> float32, or rounded once to bfloat16
//   llmsuite_split_product  the same of float32 matrices, of which nothing is rounded: in parts
// They have no gradients of their own: see `llmsuite.models.linear_ops`. Those of llmsuite_bf16_linear and
// llmsuite_split_linear have, for programs.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <vector>

#include "blocks.h"
#include "paddle/phi/api/ext/op_meta_info.h"
#include "paddle/phi/api/include/api.h"
#include "paddle/phi/api/include/tensor.h"
#include "linear.h"
#include "rounding.h"

using Tensor = paddle::Tensor;
using Type = paddle::DataType;
using Dims = std::vector<int64_t>;

namespace {

Dims Shape(const Dims& a, const Dims& b, bool ta, bool tb) {
  Dims shape = ta ? Dims{a.back(), 0} : a;
  shape.back() = tb ? b.front() : b.back();
  return shape;
}

// Leading dims are rows. Each a is [..., K], or with ta [..., M] of as many rows as b has; b [K, N], with tb [N, K].
struct Sides {
  Dims shape;
  int64_t m, n;
  std::vector<Tensor> a, b;
  std::vector<blocks::Pair> pairs;

  // `take(a)` is a as the product needs it.
  template <typename F>
  Sides(const std::vector<Tensor>& left, const std::vector<Tensor>& right, bool ta, bool tb, F take) {
    PD_CHECK(!left.empty() && left.size() == right.size(), "as many matrices are needed on the left as on the right");
    shape = Shape(left[0].shape(), right[0].shape(), ta, tb);
    n = shape.back();
    m = std::accumulate(shape.begin(), shape.end() - 1, int64_t{1}, std::multiplies<int64_t>());
    for (size_t i = 0; m * n && i < left.size(); ++i) {
      const int64_t wide = left[i].shape().back(), rows = wide ? left[i].numel() / wide : 0, k = ta ? rows : wide;
      const int64_t others = right[i].numel() / n;  // leading dims of both are rows, where a is transposed
      PD_CHECK(Shape(left[i].shape(), right[i].shape(), ta, tb) == shape && others == k,
               "matrices that do not fit: ", k, " and ", others, " are to be added up, or the outputs of pairs differ");
      if (k == 0) continue;
      a.push_back(take(left[i])), b.push_back(right[i]);
      pairs.push_back({Matrix(a.back(), wide, ta), Matrix(b.back(), tb ? k : n, tb), k});
    }
  }

 private:
  static blocks::Matrix Matrix(const Tensor& x, int64_t lead, bool is_turned) {
    return {x.data(), !rounding::IsBf16(x), lead, is_turned};
  }
};

std::vector<Tensor> Product(const std::vector<Tensor>& a, const std::vector<Tensor>& b, bool ta, bool tb,
                            bool is_narrow) {
  const Sides sides(a, b, ta, tb, [](const Tensor& x) { return rounding::ToBf16(x); });
  Tensor c = rounding::New(sides.shape, is_narrow ? Type::BFLOAT16 : Type::FLOAT32, a[0]);
  if (c.numel() == 0) return {c};
  if (sides.pairs.empty())
    std::memset(c.data(), 0, c.numel() * (is_narrow ? 2 : 4));
  else
    blocks::Multiply<1>(sides.m, sides.n, sides.pairs, {c.data(), !is_narrow});
  return {c};
}

std::vector<Tensor> SplitProduct(const std::vector<Tensor>& a, const std::vector<Tensor>& b, bool ta, bool tb) {
  const Sides sides(a, b, ta, tb, [](const Tensor& x) { return x; });
  for (const blocks::Pair& pair : sides.pairs)
    PD_CHECK(pair.a.is_float && pair.b.is_float, "float32 matrices are needed");
  Tensor c = rounding::New(sides.shape, Type::FLOAT32, a[0]);
  if (c.numel() == 0) return {c};
  if (sides.pairs.empty())
    std::memset(c.data(), 0, c.numel() * 4);
  else
    blocks::Multiply<3>(sides.m, sides.n, sides.pairs, {c.data(), true});
  return {c};
}

Tensor Multiply(const Tensor& a, const Tensor& b, bool ta, bool tb, bool is_narrow) {
  return Product({a}, {b}, ta, tb, is_narrow)[0];
}
std::vector<Tensor> LinearForward(const Tensor& x, const Tensor& w, bool transpose, bool takes, bool gives) {
  return linear::Forward(x, w, transpose, gives, Multiply);
}
std::vector<Tensor> LinearBackward(const Tensor& kept, const Tensor& w, const Tensor& d_y, bool transpose, bool takes,
                                   bool gives) {
  return linear::Backward(kept, w, d_y, transpose, takes, Multiply);
}

Tensor MultiplyParts(const Tensor& a, const Tensor& b, bool ta, bool tb) {
  return SplitProduct({a}, {b}, ta, tb)[0];
}
std::vector<Tensor> SplitLinear(const Tensor& x, const Tensor& w, bool transpose) {
  return {MultiplyParts(x, w, false, transpose)};
}
std::vector<Tensor> SplitLinearBackward(const Tensor& x, const Tensor& w, const Tensor& given, bool transpose) {
  const Tensor d_y = given.contiguous();
  return {MultiplyParts(d_y, w, false, !transpose), transpose ? MultiplyParts(d_y, x, true, false)
                                                              : MultiplyParts(x, d_y, true, false)};
}
std::vector<Dims> LinearShape(const Dims& x, const Dims& w, bool transpose) { return {Shape(x, w, false, transpose)}; }
std::vector<Type> LinearType(const Type&, const Type&, bool) { return {Type::FLOAT32}; }
std::vector<Dims> LinearGradShapes(const Dims& x, const Dims& w, const Dims&, bool) { return {x, w}; }
std::vector<Type> LinearGradTypes(const Type&, const Type&, const Type&, bool) {
  return {Type::FLOAT32, Type::FLOAT32};
}

std::vector<Dims> SplitShapes(const std::vector<Dims>& a, const std::vector<Dims>& b, bool ta, bool tb) {
  return {Shape(a[0], b[0], ta, tb)};
}
std::vector<Type> SplitTypes(const std::vector<Type>&, const std::vector<Type>&, bool, bool) { return {Type::FLOAT32}; }
std::vector<Dims> ProductShapes(const std::vector<Dims>& a, const std::vector<Dims>& b, bool ta, bool tb, bool) {
  return {Shape(a[0], b[0], ta, tb)};
}
std::vector<Type> ProductTypes(const std::vector<Type>&, const std::vector<Type>&, bool, bool, bool is_narrow) {
  return {is_narrow ? Type::BFLOAT16 : Type::FLOAT32};
}

}  // namespace

PD_BUILD_OP(llmsuite_bf16_product)
    .Inputs({paddle::Vec("a"), paddle::Vec("b")}).Outputs({"c"})
    .Attrs({"transpose_a: bool", "transpose_b: bool", "is_narrow: bool"})
    .SetKernelFn(PD_KERNEL(Product)).SetInferShapeFn(PD_INFER_SHAPE(ProductShapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(ProductTypes));

LLMSUITE_LINEAR(llmsuite_bf16_linear, LinearForward, LinearBackward);

PD_BUILD_OP(llmsuite_split_product)
    .Inputs({paddle::Vec("a"), paddle::Vec("b")}).Outputs({"c"}).Attrs({"transpose_a: bool", "transpose_b: bool"})
    .SetKernelFn(PD_KERNEL(SplitProduct)).SetInferShapeFn(PD_INFER_SHAPE(SplitShapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(SplitTypes));

PD_BUILD_OP(llmsuite_split_linear)
    .Inputs({"x", "w"}).Outputs({"y"}).Attrs({"transpose: bool"}).SetKernelFn(PD_KERNEL(SplitLinear))
    .SetInferShapeFn(PD_INFER_SHAPE(LinearShape)).SetInferDtypeFn(PD_INFER_DTYPE(LinearType));
PD_BUILD_GRAD_OP(llmsuite_split_linear)
    .Inputs({"x", "w", paddle::Grad("y")}).Outputs({paddle::Grad("x"), paddle::Grad("w")})
    .Attrs({"transpose: bool"}).SetKernelFn(PD_KERNEL(SplitLinearBackward))
    .SetInferShapeFn(PD_INFER_SHAPE(LinearGradShapes)).SetInferDtypeFn(PD_INFER_DTYPE(LinearGradTypes));
