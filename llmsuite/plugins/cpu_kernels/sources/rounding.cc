// Rounding to bfloat16 in one pass over memory, on all threads; Paddle's casts use one.
//   llmsuite_round_bf16  float32 -> bfloat16
//   llmsuite_rounded     float32 or bfloat16 -> the same values as float32, rounded to what bfloat16 has
#include "rounding.h"

#include "common.h"

namespace {

std::vector<Tensor> Round(const Tensor& x) { return {rounding::ToBf16(x)}; }

std::vector<Tensor> Rounded(const Tensor& x) {
  using rounding::Half;
  using rounding::Whole;
  const bool is_bf16 = rounding::IsBf16(x);
  Tensor y = rounding::New(x.shape(), paddle::DataType::FLOAT32, x);
  float* to = y.data<float>();
  if (is_bf16) {
    rounding::Each(static_cast<const uint16_t*>(x.data()), to, x.numel(), [](uint16_t value) { return Whole(value); });
  } else {
    rounding::Each(x.data<float>(), to, x.numel(), [](float value) { return Whole(Half(value)); });
  }
  return {y};
}

using Shape = std::vector<int64_t>;
std::vector<Shape> AsX(const Shape& x) { return {x}; }
std::vector<paddle::DataType> Bf16(const paddle::DataType&) { return {paddle::DataType::BFLOAT16}; }
std::vector<paddle::DataType> Float32(const paddle::DataType&) { return {paddle::DataType::FLOAT32}; }

}  // namespace

PD_BUILD_OP(llmsuite_round_bf16)
    .Inputs({"x"}).Outputs({"y"})
    .SetKernelFn(PD_KERNEL(Round)).SetInferShapeFn(PD_INFER_SHAPE(AsX)).SetInferDtypeFn(PD_INFER_DTYPE(Bf16));
PD_BUILD_OP(llmsuite_rounded)
    .Inputs({"x"}).Outputs({"y"})
    .SetKernelFn(PD_KERNEL(Rounded)).SetInferShapeFn(PD_INFER_SHAPE(AsX)).SetInferDtypeFn(PD_INFER_DTYPE(Float32));
