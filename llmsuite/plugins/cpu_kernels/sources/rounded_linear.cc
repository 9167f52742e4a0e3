// The product of linear.h on processors whose instructions for bfloat16 are slower than those for float32, or that have
// none: a float32 product of rounded inputs, by MKL.
#include "common.h"
#include "linear.h"

extern "C" void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float* a,
                            int lda, const float* b, int ldb, float beta, float* c, int ldc);

namespace {

constexpr int kRowMajor = 101, kPlain = 111, kTransposed = 112;

Tensor Rounded(const Tensor& x) {
  const bool is_bf16 = rounding::IsBf16(x);
  Tensor y = rounding::New(x.shape(), linear::Type::FLOAT32, x);
  float* to = y.data<float>();
  const auto widened = [](uint16_t value) { return rounding::Whole(value); };
  const auto rounded = [](float value) { return rounding::Whole(rounding::Half(value)); };
  if (is_bf16)
    rounding::Each(static_cast<const uint16_t*>(x.data()), to, x.numel(), widened);
  else
    rounding::Each(x.data<float>(), to, x.numel(), rounded);
  return y;
}

Tensor Wide(const Tensor& a, const Tensor& b, bool ta, bool tb) {
  const int64_t wide = a.shape().back(), rows = wide ? a.numel() / wide : 0;
  const int64_t n = tb ? b.shape().front() : b.shape().back(), m = ta ? wide : rows, k = ta ? rows : wide;
  linear::Dims shape = ta ? linear::Dims{wide, n} : a.shape();
  shape.back() = n;
  Tensor c = rounding::New(shape, linear::Type::FLOAT32, a);
  if (c.numel() == 0) return c;
  if (k == 0) {
    std::fill_n(c.data<float>(), c.numel(), 0.f);
    return c;
  }
  const Tensor left = Rounded(a), right = Rounded(b);
  cblas_sgemm(kRowMajor, ta ? kTransposed : kPlain, tb ? kTransposed : kPlain, m, n, k, 1.f, left.data<float>(), wide,
              right.data<float>(), tb ? k : n, 0.f, c.data<float>(), n);
  return c;
}

Tensor Multiply(const Tensor& a, const Tensor& b, bool ta, bool tb, bool is_narrow) {
  const Tensor c = Wide(a, b, ta, tb);
  return is_narrow ? rounding::ToBf16(c) : c;
}

std::vector<Tensor> Forward(const Tensor& x, const Tensor& w, bool transpose, bool takes, bool gives) {
  return linear::Forward(x, w, transpose, gives, Multiply);
}
std::vector<Tensor> Backward(const Tensor& kept, const Tensor& w, const Tensor& d_y, bool transpose, bool takes,
                             bool gives) {
  return linear::Backward(kept, w, d_y, transpose, takes, Multiply);
}

}  // namespace

LLMSUITE_LINEAR(llmsuite_rounded_linear, Forward, Backward);
