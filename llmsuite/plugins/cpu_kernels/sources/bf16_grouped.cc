// The products of grouped.h by instructions for bfloat16, as in products.cc:
//   llmsuite_bf16_grouped_product, _rows
#include "blocks.h"
#include "grouped.h"
#include "rounding.h"

namespace {

struct Blocks {
  static Tensor Rows(const Tensor& x) { return rounding::ToBf16(x); }
  static Tensor Matrices(const Tensor& w) { return w; }  // rounded as they are read
  static void Multiply(int64_t m, int64_t n, int64_t k, const grouped::Matrix& a, const grouped::Matrix& b, float* c) {
    blocks::Multiply<1>(m, n, {{Side(a, m, k), Side(b, k, n), k}}, {c, true});
  }

 private:
  static blocks::Matrix Side(const grouped::Matrix& x, int64_t rows, int64_t columns) {
    const bool is_float = x.tensor.dtype() == paddle::DataType::FLOAT32;
    const auto* data = static_cast<const char*>(x.tensor.data()) + x.from * (is_float ? 4 : 2);
    return {data, is_float, x.is_turned ? rows : columns, x.is_turned};
  }
};

LLMSUITE_GROUPED(llmsuite_bf16_grouped, Blocks)

}  // namespace
