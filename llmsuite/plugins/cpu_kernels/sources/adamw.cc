// Updates of AdamW, in place, in one pass on all threads:
//   llmsuite_adamw  parameters, their gradients, both moments, and both decay rates to the power of the updates so far
//                   and this one -> the first parameter; the gradients are multiplied by a factor first
// The same computation as Paddle's operation (Loshchilov and Hutter 2019, arXiv 1711.05101; Kingma and Ba 2015, arXiv
// 1412.6980, section 2, in its efficient order of computation), which takes twice as long. The result of an element
// does not depend on its neighbours.
#include <cmath>

#include "common.h"

namespace {

float* Number(const Tensor& x, const char* name) {
  PD_CHECK(x.numel() == 1, name, " is one number");
  return Data(x, name);
}

// One parameter.
struct Update {
  const float* gradient;
  float *parameter, *moment1, *moment2;
  float step, least, kept;  // the learning rate and epsilon of this update, and what is left of the weight

  void operator()(int64_t begin, int64_t end, float factor, float beta1, float beta2) const {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) {
      const float g = gradient[i] * factor;
      const float m = moment1[i] = beta1 * moment1[i] + (1.f - beta1) * g;
      const float v = moment2[i] = beta2 * moment2[i] + (1.f - beta2) * g * g;
      parameter[i] = kept * parameter[i] - step * (m / (std::sqrt(v) + least));
    }
  }
};

using Tensors = std::vector<Tensor>;

Tensors AdamW(const Tensors& parameters, const Tensors& gradients, const Tensors& moments1, const Tensors& moments2,
              const Tensors& powers1, const Tensors& powers2, float factor, float beta1, float beta2, float epsilon,
              const std::vector<float>& rates, const std::vector<float>& decays) {
  const size_t count = parameters.size();
  for (const Tensors* all : {&gradients, &moments1, &moments2, &powers1, &powers2})
    PD_CHECK(all->size() == count, "as many are needed as parameters");
  PD_CHECK(rates.size() == count && decays.size() == count, "each parameter needs a rate and a decay");
  std::vector<Update> updates;
  for (size_t i = 0; i < count; ++i) {
    for (const Tensors* all : {&gradients, &moments1, &moments2})
      PD_CHECK((*all)[i].numel() == parameters[i].numel(), "sizes differ");
    float *power1 = Number(powers1[i], "power1"), *power2 = Number(powers2[i], "power2");
    const float root = std::sqrt(1.f - *power2), step = rates[i] * root / (1.f - *power1);
    updates.push_back({Data(gradients[i], "gradient"), Data(parameters[i], "parameter"), Data(moments1[i], "moment1"),
                       Data(moments2[i], "moment2"), step, epsilon * root, 1.f - rates[i] * decays[i]});
    *power1 *= beta1, *power2 *= beta2;
  }
  const std::vector<Chunk> chunks = Chunks(parameters);
#pragma omp parallel for if (chunks.size() > 4)
  for (size_t i = 0; i < chunks.size(); ++i)
    updates[chunks[i].tensor](chunks[i].begin, chunks[i].end, factor, beta1, beta2);
  return {parameters[0]};
}

using Dims = std::vector<int64_t>;
using Type = paddle::DataType;
using Shapes = std::vector<Dims>;
using Types = std::vector<Type>;
Shapes Same(const Shapes& p, const Shapes&, const Shapes&, const Shapes&, const Shapes&, const Shapes&, float, float,
            float, float, const std::vector<float>&, const std::vector<float>&) {
  return {p[0]};
}
Types SameType(const Types& p, const Types&, const Types&, const Types&, const Types&, const Types&) { return {p[0]}; }

}  // namespace

PD_BUILD_OP(llmsuite_adamw)
    .Inputs({paddle::Vec("parameters"), paddle::Vec("gradients"), paddle::Vec("moments1"), paddle::Vec("moments2"),
             paddle::Vec("powers1"), paddle::Vec("powers2")})
    .Outputs({"updated"})
    .Attrs({"factor: float", "beta1: float", "beta2: float", "epsilon: float", "rates: std::vector<float>",
            "decays: std::vector<float>"})
    .SetKernelFn(PD_KERNEL(AdamW)).SetInferShapeFn(PD_INFER_SHAPE(Same)).SetInferDtypeFn(PD_INFER_DTYPE(SameType));
