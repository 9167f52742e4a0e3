// An update of AdamW, in place, in one pass on all threads:
//   llmsuite_adamw  a parameter, its gradient, the learning rate, both moments, and both decay rates to the power of the
//                   updates so far and this one -> the parameter; the gradient is multiplied by a factor first
// As Paddle's operation computes it (Loshchilov and Hutter 2019, arXiv 1711.05101; Kingma and Ba 2015, arXiv 1412.6980,
// section 2, in the order of computation it gives for efficiency), which takes twice as long. An element's numbers do not
// depend on those beside it.
#include <cmath>

#include "common.h"

namespace {

constexpr int64_t kChunk = 1 << 14;

float Number(const Tensor& x, const char* name) {
  Check(x, name);
  PD_CHECK(x.numel() == 1, name, " is one number");
  return *x.data<float>();
}

std::vector<Tensor> AdamW(const Tensor& parameter, const Tensor& gradient, const Tensor& rate, const Tensor& moment1,
                          const Tensor& moment2, const Tensor& power1, const Tensor& power2, float factor, float beta1,
                          float beta2, float epsilon, float decay) {
  Tensor of_p = parameter, of_m = moment1, of_v = moment2, first = power1, second = power2;  // they share the memory
  const int64_t count = parameter.numel();
  Check(parameter, "parameter"), Check(gradient, "gradient"), Check(moment1, "moment1"), Check(moment2, "moment2");
  PD_CHECK(gradient.numel() == count && moment1.numel() == count && moment2.numel() == count, "sizes differ");
  const float lr = Number(rate, "rate"), root = std::sqrt(1.f - Number(power2, "power2"));
  const float step = lr * root / (1.f - Number(power1, "power1")), least = epsilon * root, kept = 1.f - lr * decay;
  const float *pg = gradient.data<float>();
  float *pp = of_p.data<float>(), *pm = of_m.data<float>(), *pv = of_v.data<float>();
#pragma omp parallel for if (count > 4 * kChunk)
  for (int64_t begin = 0; begin < count; begin += kChunk) {
    const int64_t end = std::min(count, begin + kChunk);
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) {
      const float g = pg[i] * factor;
      const float m = pm[i] = beta1 * pm[i] + (1.f - beta1) * g;
      const float v = pv[i] = beta2 * pv[i] + (1.f - beta2) * g * g;
      pp[i] = kept * pp[i] - step * (m / (std::sqrt(v) + least));
    }
  }
  *first.data<float>() *= beta1, *second.data<float>() *= beta2;
  return {of_p};
}

using Dims = std::vector<int64_t>;
using Type = paddle::DataType;
std::vector<Dims> Same(const Dims& p, const Dims&, const Dims&, const Dims&, const Dims&, const Dims&, const Dims&,
                       float, float, float, float, float) {
  return {p};
}
std::vector<Type> SameType(const Type& p, const Type&, const Type&, const Type&, const Type&, const Type&,
                           const Type&) {
  return {p};
}

}  // namespace

PD_BUILD_OP(llmsuite_adamw)
    .Inputs({"parameter", "gradient", "rate", "moment1", "moment2", "power1", "power2"}).Outputs({"updated"})
    .Attrs({"factor: float", "beta1: float", "beta2: float", "epsilon: float", "decay: float"})
    .SetKernelFn(PD_KERNEL(AdamW)).SetInferShapeFn(PD_INFER_SHAPE(Same)).SetInferDtypeFn(PD_INFER_DTYPE(SameType));
