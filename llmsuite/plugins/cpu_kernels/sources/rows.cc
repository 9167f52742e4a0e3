// Row-wise operations in one pass over memory, where plain operators would make several.
#include <algorithm>
#include <cmath>

#include "common.h"
#include "paddle/phi/api/include/tensor_utils.h"
#include "rounding.h"

namespace {

// x / rms(x) * weight over the last dim

std::vector<Tensor> NormForward(const Tensor& x, const Tensor& weight, float eps) {
  Check(x, "x"), Check(weight, "weight");
  const int64_t size = weight.numel(), rows = x.numel() / size;
  Tensor y = Like(x), scales = Floats({rows}, x);
  const float *px = x.data<float>(), *pw = weight.data<float>();
  float *py = y.data<float>(), *ps = scales.data<float>();
#pragma omp parallel for
  for (int64_t i = 0; i < rows; ++i) {
    const float* in = px + i * size;
    float squares = 0.f;
#pragma omp simd reduction(+ : squares)
    for (int64_t j = 0; j < size; ++j) squares += in[j] * in[j];
    const float scale = ps[i] = 1.f / std::sqrt(squares / size + eps);
#pragma omp simd
    for (int64_t j = 0; j < size; ++j) py[i * size + j] = in[j] * scale * pw[j];
  }
  return {y, scales};
}

std::vector<Tensor> NormBackward(const Tensor& x, const Tensor& weight, const Tensor& scales, const Tensor& d_y) {
  const Tensor d_whole = d_y.contiguous();
  const int64_t size = weight.numel(), rows = x.numel() / size;
  Tensor dx = Like(x), dw = Like(weight);
  const float *px = x.data<float>(), *pw = weight.data<float>(), *ps = scales.data<float>(), *pd = d_whole.data<float>();
  float *pdx = dx.data<float>(), *pdw = dw.data<float>();
  // sums of a few rows, then of those sums, so that rounding grows little with rows and threads
  constexpr int64_t kRows = 32;
  const int64_t parts = (rows + kRows - 1) / kRows;
  std::vector<float> sums(parts * size, 0.f);
#pragma omp parallel for
  for (int64_t part = 0; part < parts; ++part) {
    float* sum = sums.data() + part * size;
    for (int64_t i = part * kRows; i < std::min(rows, (part + 1) * kRows); ++i) {
      const float *in = px + i * size, *d = pd + i * size;
      float dot = 0.f;
#pragma omp simd reduction(+ : dot)
      for (int64_t j = 0; j < size; ++j) dot += d[j] * pw[j] * in[j];
      const float scale = ps[i], back = dot * scale * scale / size;
#pragma omp simd
      for (int64_t j = 0; j < size; ++j) {
        pdx[i * size + j] = scale * (d[j] * pw[j] - in[j] * back);
        sum[j] += d[j] * in[j] * scale;
      }
    }
  }
  std::vector<double> total(size, 0.0);
  for (int64_t part = 0; part < parts; ++part)
    for (int64_t j = 0; j < size; ++j) total[j] += sums[part * size + j];
  std::copy(total.begin(), total.end(), pdw);
  return {dx, dw};
}

using rounding::Put;
using rounding::Wide;

// Rotary embedding, the two halves of each head as pairs: x [B, L, H, K]; cos, sin [1 or B, L, 1, K / 2]. Of float32
// numbers, or of bfloat16 ones to such, computed in float32.

template <typename T>
Tensor TurnedOf(const Tensor& x, const Tensor& cos, const Tensor& sin, float sign) {
  Check(cos, "cos"), Check(sin, "sin");
  const int64_t heads = x.shape()[2], half = x.shape()[3] / 2, rows = x.shape()[0] * x.shape()[1];
  const int64_t turns = cos.numel() / half;  // L, or B L
  PD_CHECK(rows % turns == 0 && sin.numel() == cos.numel(), "cos and sin do not fit x");
  Tensor y = Like(x);
  const T* px = static_cast<const T*>(x.data());
  const float *pc = cos.data<float>(), *ps = sin.data<float>();
  T* py = static_cast<T*>(y.data());
#pragma omp parallel for
  for (int64_t i = 0; i < rows; ++i) {
    const float *c = pc + i % turns * half, *s = ps + i % turns * half;
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t at = (i * heads + h) * 2 * half;
      const T *first = px + at, *second = first + half;
#pragma omp simd
      for (int64_t j = 0; j < half; ++j) {
        const float turn = sign * s[j];
        Put(Wide(first[j]) * c[j] - Wide(second[j]) * turn, py[at + j]);
        Put(Wide(second[j]) * c[j] + Wide(first[j]) * turn, py[at + half + j]);
      }
    }
  }
  return y;
}

Tensor Turned(const Tensor& given, const Tensor& cos, const Tensor& sin, float sign) {
  const Tensor x = given.contiguous();
  return (rounding::IsBf16(x) ? TurnedOf<uint16_t> : TurnedOf<float>)(x, cos, sin, sign);
}

std::vector<Tensor> RotaryForward(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  return {Turned(x, cos, sin, 1.f)};
}
std::vector<Tensor> RotaryBackward(const Tensor& cos, const Tensor& sin, const Tensor& d_y) {
  return {Turned(d_y, cos, sin, -1.f)};
}

// silu(gate) * up, of float32 numbers, or of bfloat16 ones to such, computed in float32

inline float Swiglu(float gate, float up) { return gate / (1.f + Exp(-gate)) * up; }

template <typename T>
void Swiglus(int64_t count, const void* gate, const void* up, void* y) {
  const T *pg = static_cast<const T*>(gate), *pu = static_cast<const T*>(up);
  T* py = static_cast<T*>(y);
#pragma omp parallel for simd
  for (int64_t i = 0; i < count; ++i) Put(Swiglu(Wide(pg[i]), Wide(pu[i])), py[i]);
}

template <typename T>
void SwigluGradients(int64_t count, const void* gate, const void* up, const void* d, void* d_gate, void* d_up) {
  const T *pg = static_cast<const T*>(gate), *pu = static_cast<const T*>(up), *pd = static_cast<const T*>(d);
  T *pdg = static_cast<T*>(d_gate), *pdu = static_cast<T*>(d_up);
#pragma omp parallel for simd
  for (int64_t i = 0; i < count; ++i) {
    const float x = Wide(pg[i]), sigmoid = 1.f / (1.f + Exp(-x)), silu = x * sigmoid;
    Put(Wide(pd[i]) * Wide(pu[i]) * (sigmoid + silu * (1.f - sigmoid)), pdg[i]);
    Put(Wide(pd[i]) * silu, pdu[i]);
  }
}

std::vector<Tensor> SwigluForward(const Tensor& gate, const Tensor& up) {
  PD_CHECK(rounding::IsBf16(gate) == rounding::IsBf16(up) && gate.numel() == up.numel(), "gate and up differ");
  Tensor y = Like(gate);
  (rounding::IsBf16(gate) ? Swiglus<uint16_t> : Swiglus<float>)(gate.numel(), gate.data(), up.data(), y.data());
  return {y};
}

std::vector<Tensor> SwigluBackward(const Tensor& gate, const Tensor& up, const Tensor& d_y) {
  const Tensor d_whole = d_y.contiguous();
  PD_CHECK(rounding::IsBf16(gate) == rounding::IsBf16(d_whole), "a gradient of another type");
  Tensor d_gate = Like(gate), d_up = Like(up);
  (rounding::IsBf16(gate) ? SwigluGradients<uint16_t> : SwigluGradients<float>)(
      gate.numel(), gate.data(), up.data(), d_whole.data(), d_gate.data(), d_up.data());
  return {d_gate, d_up};
}

// silu(gate) * up of gate and up side by side, [..., 2 F], float32, which with `rounds` are rounded to bfloat16 first;
// without a gradient
std::vector<Tensor> JoinedSwiglu(const Tensor& both, bool rounds) {
  Check(both, "gate and up");
  std::vector<int64_t> shape = both.shape();
  const int64_t size = shape.back() /= 2, rows = both.numel() / (2 * size);
  Tensor y = Floats(shape, both);
  const float* px = both.data<float>();
  float* py = y.data<float>();
  const auto each = [&](auto as_kept) {
#pragma omp parallel for
    for (int64_t i = 0; i < rows; ++i) {
      const float *gate = px + i * 2 * size, *up = gate + size;
#pragma omp simd
      for (int64_t j = 0; j < size; ++j) py[i * size + j] = Swiglu(as_kept(gate[j]), as_kept(up[j]));
    }
  };
  if (rounds)
    each([](float x) { return rounding::Whole(rounding::Half(x)); });
  else
    each([](float x) { return x; });
  return {y};
}

// negative log-probability of each target: logits [N, V], targets [N] int64 -> [N]

std::vector<Tensor> CrossEntropyForward(const Tensor& logits, const Tensor& targets) {
  Check(logits, "logits");
  const int64_t rows = logits.shape()[0], size = logits.shape()[1];
  Tensor nll = Floats({rows}, logits), sums = Floats({rows}, logits);
  const float* px = logits.data<float>();
  const int64_t* pt = targets.data<int64_t>();
  float *pn = nll.data<float>(), *ps = sums.data<float>();
#pragma omp parallel for
  for (int64_t i = 0; i < rows; ++i) {
    const float* row = px + i * size;
    float highest = row[0], sum = 0.f;
#pragma omp simd reduction(max : highest)
    for (int64_t j = 0; j < size; ++j) highest = std::max(highest, row[j]);
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < size; ++j) sum += Exp(row[j] - highest);
    const float log_sum = std::log(sum);
    ps[i] = highest + log_sum;
    pn[i] = log_sum - (row[pt[i]] - highest);
  }
  return {nll, sums};
}

// Gradients of `count` rows from the first one on, in the place of their logits.
void CrossEntropyRows(Tensor& logits, const Tensor& targets, const Tensor& sums, const Tensor& d_nll, int64_t first,
                      int64_t count) {
  const int64_t size = logits.shape()[1];
  const float *ps = sums.data<float>(), *pd = d_nll.data<float>();
  const int64_t* pt = targets.data<int64_t>();
  float* px = logits.data<float>();
#pragma omp parallel for
  for (int64_t i = first; i < first + count; ++i) {
    float* row = px + i * size;
    const float log_sum = ps[i], d = pd[i];
    float sum = 0.f;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < size; ++j) sum += row[j] = Exp(row[j] - log_sum);
    // the sum of these rounded numbers, not 1: the gradients of a row then sum to zero
    const float each = d / sum;
#pragma omp simd
    for (int64_t j = 0; j < size; ++j) row[j] *= each;
    row[pt[i]] -= d;
  }
}

// The gradient overwrites the logits, which have no later reader.
std::vector<Tensor> CrossEntropyBackward(const Tensor& logits, const Tensor& targets, const Tensor& sums,
                                         const Tensor& d_nll) {
  Tensor d_logits = logits;
  CrossEntropyRows(d_logits, targets, sums, d_nll.contiguous(), 0, logits.shape()[0]);
  return {d_logits};
}

// The same rounded to bfloat16, in the first half of the logits' memory. A few rows at a time are rounded in a buffer
// and then copied there, in order, so that they overwrite only logits that have been read.
std::vector<Tensor> NarrowCrossEntropyBackward(const Tensor& logits, const Tensor& targets, const Tensor& sums,
                                               const Tensor& d_nll) {
  Check(logits, "logits");
  const Tensor d_whole = d_nll.contiguous();
  Tensor d_logits = logits;
  const int64_t rows = logits.shape()[0], size = logits.shape()[1];
  constexpr int64_t kRows = 16;
  std::vector<uint16_t> rounded(kRows * size);
  const float* from = d_logits.data<float>();
  uint16_t* to = reinterpret_cast<uint16_t*>(d_logits.data<float>());
  for (int64_t first = 0; first < rows; first += kRows) {
    const int64_t count = std::min(kRows, rows - first);
    CrossEntropyRows(d_logits, targets, sums, d_whole, first, count);
    rounding::Each(from + first * size, rounded.data(), count * size,
                   [](float value) { return rounding::Half(value); });
    std::memcpy(to + first * size, rounded.data(), count * size * sizeof(uint16_t));
  }
  return {paddle::from_blob(to, logits.shape(), paddle::DataType::BFLOAT16, paddle::DataLayout::NCHW, logits.place(),
                            [d_logits](void*) {})};
}

using Dims = std::vector<int64_t>;
std::vector<Dims> NormShapes(const Dims& x, const Dims& weight, float) {
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < x.size(); ++i) rows = x[i] < 0 || rows < 0 ? -1 : rows * x[i];
  return {x, {rows}};
}
std::vector<Dims> RotaryShapes(const Dims& x, const Dims&, const Dims&) { return {x}; }
std::vector<Dims> RotaryGradShapes(const Dims&, const Dims&, const Dims& d_y) { return {d_y}; }
std::vector<Dims> SwigluShapes(const Dims& gate, const Dims&) { return {gate}; }
std::vector<Dims> JoinedSwigluShapes(Dims both, bool) {
  both.back() /= 2;
  return {both};
}
std::vector<Dims> CrossEntropyShapes(const Dims& logits, const Dims&) { return {{logits[0]}, {logits[0]}}; }

using Type = paddle::DataType;
std::vector<Type> TwoLikeFirst(const Type& first, const Type&) { return {first, first}; }
std::vector<Type> Same(const Type& type) { return {type}; }
std::vector<Type> LikeFirst(const Type& first, const Type&) { return {first}; }
std::vector<Type> RotaryTypes(const Type& x, const Type&, const Type&) { return {x}; }
std::vector<Type> RotaryGradTypes(const Type&, const Type&, const Type& d_y) { return {d_y}; }

}  // namespace

PD_BUILD_OP(llmsuite_rms_norm)
    .Inputs({"x", "weight"})
    .Outputs({"y", "scales"})
    .Attrs({"eps: float"})
    .SetKernelFn(PD_KERNEL(NormForward))
    .SetInferShapeFn(PD_INFER_SHAPE(NormShapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(TwoLikeFirst));
PD_BUILD_GRAD_OP(llmsuite_rms_norm)
    .Inputs({"x", "weight", "scales", paddle::Grad("y")})
    .Outputs({paddle::Grad("x"), paddle::Grad("weight")})
    .SetKernelFn(PD_KERNEL(NormBackward));

PD_BUILD_OP(llmsuite_rotary)
    .Inputs({"x", "cos", "sin"})
    .Outputs({"y"})
    .SetKernelFn(PD_KERNEL(RotaryForward))
    .SetInferShapeFn(PD_INFER_SHAPE(RotaryShapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(RotaryTypes));
PD_BUILD_GRAD_OP(llmsuite_rotary)
    .Inputs({"cos", "sin", paddle::Grad("y")})
    .Outputs({paddle::Grad("x")})
    .SetKernelFn(PD_KERNEL(RotaryBackward))
    .SetInferShapeFn(PD_INFER_SHAPE(RotaryGradShapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(RotaryGradTypes));

PD_BUILD_OP(llmsuite_swiglu)
    .Inputs({"gate", "up"})
    .Outputs({"y"})
    .SetKernelFn(PD_KERNEL(SwigluForward))
    .SetInferShapeFn(PD_INFER_SHAPE(SwigluShapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(LikeFirst));
PD_BUILD_GRAD_OP(llmsuite_swiglu)
    .Inputs({"gate", "up", paddle::Grad("y")})
    .Outputs({paddle::Grad("gate"), paddle::Grad("up")})
    .SetKernelFn(PD_KERNEL(SwigluBackward));

PD_BUILD_OP(llmsuite_joined_swiglu)
    .Inputs({"both"})
    .Outputs({"y"})
    .Attrs({"rounds: bool"})
    .SetKernelFn(PD_KERNEL(JoinedSwiglu))
    .SetInferShapeFn(PD_INFER_SHAPE(JoinedSwigluShapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(Same));

PD_BUILD_OP(llmsuite_cross_entropy)
    .Inputs({"logits", "targets"})
    .Outputs({"nll", "sums"})
    .SetKernelFn(PD_KERNEL(CrossEntropyForward))
    .SetInferShapeFn(PD_INFER_SHAPE(CrossEntropyShapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(TwoLikeFirst));
PD_BUILD_GRAD_OP(llmsuite_cross_entropy)
    .Inputs({"logits", "targets", "sums", paddle::Grad("nll")})
    .Outputs({paddle::Grad("logits")})
    .SetKernelFn(PD_KERNEL(CrossEntropyBackward));

PD_BUILD_OP(llmsuite_cross_entropy_back)
    .Inputs({"logits", "targets", "sums", "d_nll"})
    .Outputs({"d_logits"})
    .SetKernelFn(PD_KERNEL(NarrowCrossEntropyBackward));
