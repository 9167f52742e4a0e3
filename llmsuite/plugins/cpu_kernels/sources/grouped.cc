// The products of grouped.h by MKL:
//   llmsuite_grouped_product, _rows          in float32
//   llmsuite_rounded_grouped_product, _rows  of numbers rounded to bfloat16
#include "grouped.h"
#include "rounding.h"

extern "C" void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float* a,
                            int lda, const float* b, int ldb, float beta, float* c, int ldc);

namespace {

struct Plain {
  static Tensor Rows(const Tensor& x) { return x; }
  static Tensor Matrices(const Tensor& w) { return w; }
  static void Multiply(int64_t m, int64_t n, int64_t k, const grouped::Matrix& a, const grouped::Matrix& b, float* c) {
    constexpr int kRowMajor = 101, kPlain = 111, kTransposed = 112;
    const auto form = [](const grouped::Matrix& x) { return x.is_turned ? kTransposed : kPlain; };
    cblas_sgemm(kRowMajor, form(a), form(b), m, n, k, 1.f, a.tensor.data<float>() + a.from, a.is_turned ? m : k,
                b.tensor.data<float>() + b.from, b.is_turned ? k : n, 0.f, c, n);
  }
};

struct Rounded : Plain {
  static Tensor Rows(const Tensor& x) {
    Tensor y = Like(x);
    rounding::Each(x.data<float>(), y.data<float>(), x.numel(),
                   [](float value) { return rounding::Whole(rounding::Half(value)); });
    return y;
  }
  static Tensor Matrices(const Tensor& w) { return Rows(w); }
};

LLMSUITE_GROUPED(llmsuite_grouped, Plain)
LLMSUITE_GROUPED(llmsuite_rounded_grouped, Rounded)

}  // namespace
