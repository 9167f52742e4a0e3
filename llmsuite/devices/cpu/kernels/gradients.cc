// The two passes over the gradients in front of an update, on all threads; Paddle's operations use one.
//   llmsuite_square_sum  x -> the sum of the squares of x times a number, []
//   llmsuite_scale       x -> x times a number, in place
#include <algorithm>

#include "common.h"

namespace {

constexpr int64_t kChunk = 1 << 14;

// Chunks are summed one after the other, so that the sum does not depend on the number of threads.
std::vector<Tensor> SquareSum(const Tensor& x, float factor) {
  Check(x, "x");
  const float* px = x.data<float>();
  const int64_t count = x.numel(), chunks = (count + kChunk - 1) / kChunk;
  std::vector<float> sums(chunks);
#pragma omp parallel for if (chunks > 4)
  for (int64_t i = 0; i < chunks; ++i) {
    const int64_t end = std::min(count, (i + 1) * kChunk);
    float sum = 0.f;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = i * kChunk; j < end; ++j) sum += (px[j] * factor) * (px[j] * factor);
    sums[i] = sum;
  }
  double total = 0.0;
  for (float sum : sums) total += sum;
  Tensor y = Floats({}, x);
  *y.data<float>() = static_cast<float>(total);
  return {y};
}

std::vector<Tensor> Scale(const Tensor& x, float factor) {
  Check(x, "x");
  Tensor y = x;
  float* py = y.data<float>();
  const int64_t count = x.numel();
#pragma omp parallel for if (count > 4 * kChunk)
  for (int64_t begin = 0; begin < count; begin += kChunk) {
    const int64_t end = std::min(count, begin + kChunk);
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) py[i] *= factor;
  }
  return {y};
}

using Dims = std::vector<int64_t>;
using Type = paddle::DataType;
std::vector<Dims> Scalar(const Dims&, float) { return {Dims{}}; }
std::vector<Dims> Same(const Dims& x, float) { return {x}; }
std::vector<Type> SameType(const Type& x) { return {x}; }

}  // namespace

PD_BUILD_OP(llmsuite_square_sum)
    .Inputs({"x"}).Outputs({"y"}).Attrs({"factor: float"})
    .SetKernelFn(PD_KERNEL(SquareSum)).SetInferShapeFn(PD_INFER_SHAPE(Scalar)).SetInferDtypeFn(PD_INFER_DTYPE(SameType));
PD_BUILD_OP(llmsuite_scale)
    .Inputs({"x"}).Outputs({"y"}).Attrs({"factor: float"})
    .SetKernelFn(PD_KERNEL(Scale)).SetInferShapeFn(PD_INFER_SHAPE(Same)).SetInferDtypeFn(PD_INFER_DTYPE(SameType));
