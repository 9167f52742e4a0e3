// The two passes over the gradients in front of an update, on all threads; Paddle's operations use one.
//   llmsuite_square_sum  tensors -> the sum of the squares of all their numbers times a factor, []
//   llmsuite_scale       x -> x times a number, in place
#include <algorithm>

#include "common.h"

namespace {

// Chunks are summed one after the other, so that the sum does not depend on the number of threads.
std::vector<Tensor> SquareSum(const std::vector<Tensor>& tensors, float factor) {
  const std::vector<Chunk> chunks = Chunks(tensors);
  std::vector<const float*> data;
  for (const Tensor& x : tensors) data.push_back(Data(x, "x"));
  std::vector<float> sums(chunks.size());
#pragma omp parallel for if (chunks.size() > 4)
  for (size_t i = 0; i < chunks.size(); ++i) {
    const float* x = data[chunks[i].tensor];
    float sum = 0.f;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = chunks[i].begin; j < chunks[i].end; ++j) sum += (x[j] * factor) * (x[j] * factor);
    sums[i] = sum;
  }
  double total = 0.0;
  for (float sum : sums) total += sum;
  Tensor y = Floats({}, tensors[0]);
  *y.data<float>() = static_cast<float>(total);
  return {y};
}

std::vector<Tensor> Scale(const Tensor& x, float factor) {
  float* numbers = Data(x, "x");
  const std::vector<Chunk> chunks = Chunks({x});
#pragma omp parallel for if (chunks.size() > 4)
  for (size_t i = 0; i < chunks.size(); ++i) {
#pragma omp simd
    for (int64_t j = chunks[i].begin; j < chunks[i].end; ++j) numbers[j] *= factor;
  }
  return {x};
}

using Dims = std::vector<int64_t>;
using Type = paddle::DataType;
std::vector<Dims> Scalar(const std::vector<Dims>&, float) { return {Dims{}}; }
std::vector<Type> OneType(const std::vector<Type>& types) { return {types[0]}; }
std::vector<Dims> Same(const Dims& x, float) { return {x}; }
std::vector<Type> SameType(const Type& x) { return {x}; }

}  // namespace

PD_BUILD_OP(llmsuite_square_sum)
    .Inputs({paddle::Vec("tensors")}).Outputs({"y"}).Attrs({"factor: float"})
    .SetKernelFn(PD_KERNEL(SquareSum)).SetInferShapeFn(PD_INFER_SHAPE(Scalar)).SetInferDtypeFn(PD_INFER_DTYPE(OneType));
PD_BUILD_OP(llmsuite_scale)
    .Inputs({"x"}).Outputs({"y"}).Attrs({"factor: float"})
    .SetKernelFn(PD_KERNEL(Scale)).SetInferShapeFn(PD_INFER_SHAPE(Same)).SetInferDtypeFn(PD_INFER_DTYPE(SameType));
