// Causal attention of blocks of queries (Dao et al. 2022, arXiv 2205.14135, without its blocks of keys): scores exist
// for one block of one head at a time, keys that a block does not see are skipped, and the backward pass makes the
// scores again from the logarithm of their sum. Heads lie where the projections have put them: nothing is transposed.
//
// Shapes: B batch, L queries, S keys, H query heads, J key-value heads, K head size. Query i of a row sees the keys
// from begins[b, i], or 0, up to i + S - L.
#include <algorithm>
#include <cmath>

#include "common.h"

extern "C" void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float* a,
                            int lda, const float* b, int ldb, float beta, float* c, int ldc);

namespace {

constexpr int64_t kBlock = 64;
constexpr int kRowMajor = 101, kPlain = 111, kTransposed = 112;

struct Shape {
  int64_t B, L, S, H, J, K;
  int64_t wide() const { return H * K; }     // between two queries
  int64_t narrow() const { return J * K; }   // between two keys
  int64_t blocks() const { return (L + kBlock - 1) / kBlock; }
};

Shape Read(const Tensor& q, const Tensor& k, const Tensor& v, const paddle::optional<Tensor>& begins) {
  Check(q, "q"), Check(k, "k"), Check(v, "v");
  Shape s{q.shape()[0], q.shape()[1], k.shape()[1], q.shape()[2], k.shape()[2], q.shape()[3]};
  PD_CHECK(k.shape() == v.shape() && s.H % s.J == 0 && s.L <= s.S, "q, k and v do not fit together");
  if (begins) PD_CHECK(begins->dtype() == paddle::DataType::INT64 && begins->is_contiguous(), "begins: int64 [B, L]");
  return s;
}

// One block of queries of one head, and the keys that any of them sees.
struct Block {
  int64_t first, rows, low, high;
  const int64_t* begins;
  int64_t shift;

  Block(const Shape& s, int64_t number, const int64_t* begins_of_row)
      : first(number * kBlock), rows(std::min(kBlock, s.L - first)), shift(s.S - s.L) {
    begins = begins_of_row ? begins_of_row + first : nullptr;
    high = first + rows + shift;
    low = begins ? std::clamp<int64_t>(*std::min_element(begins, begins + rows), 0, first + shift) : 0;
  }
  int64_t keys() const { return high - low; }
  // keys of the block that query r sees: [from, to), counted from `low`
  int64_t from(int64_t r) const { return begins ? std::clamp<int64_t>(begins[r] - low, 0, to(r) - 1) : 0; }
  int64_t to(int64_t r) const { return first + r + shift + 1 - low; }
};

void Product(int ta, int tb, int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda, const float* b,
             int64_t ldb, float beta, float* c, int64_t ldc) {
  cblas_sgemm(kRowMajor, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

std::vector<Tensor> Forward(const Tensor& q, const Tensor& k, const Tensor& v,
                            const paddle::optional<Tensor>& begins) {
  const Shape s = Read(q, k, v, begins);
  Tensor out = Like(q), sums = Floats({s.B, s.H, s.L}, q);
  const float *pq = q.data<float>(), *pk = k.data<float>(), *pv = v.data<float>();
  const int64_t* pb = begins ? begins->data<int64_t>() : nullptr;
  float *po = out.data<float>(), *ps = sums.data<float>();
  const float scale = 1.f / std::sqrt(static_cast<float>(s.K));
#pragma omp parallel
  {
    std::vector<float> scores(kBlock * s.S);
#pragma omp for collapse(3) schedule(monotonic : dynamic)
    for (int64_t b = 0; b < s.B; ++b)
      for (int64_t h = 0; h < s.H; ++h)
        for (int64_t number = s.blocks() - 1; number >= 0; --number) {  // the longest first
          const Block block(s, number, pb ? pb + b * s.L : nullptr);
          const int64_t n = block.keys(), j = h / (s.H / s.J);
          const int64_t at_q = (b * s.L + block.first) * s.wide() + h * s.K;
          const int64_t at_k = (b * s.S + block.low) * s.narrow() + j * s.K;
          Product(kPlain, kTransposed, block.rows, n, s.K, scale, pq + at_q, s.wide(), pk + at_k, s.narrow(), 0.f,
                  scores.data(), n);
          for (int64_t r = 0; r < block.rows; ++r) {
            float* row = scores.data() + r * n;
            const int64_t from = block.from(r), to = block.to(r);
            float highest = row[from], sum = 0.f;
#pragma omp simd reduction(max : highest)
            for (int64_t i = from; i < to; ++i) highest = std::max(highest, row[i]);
#pragma omp simd reduction(+ : sum)
            for (int64_t i = from; i < to; ++i) sum += row[i] = Exp(row[i] - highest);
            const float inverse = 1.f / sum;
#pragma omp simd
            for (int64_t i = from; i < to; ++i) row[i] *= inverse;
            std::fill(row, row + from, 0.f), std::fill(row + to, row + n, 0.f);
            ps[(b * s.H + h) * s.L + block.first + r] = highest + std::log(sum);
          }
          Product(kPlain, kPlain, block.rows, s.K, n, 1.f, scores.data(), n, pv + at_k, s.narrow(), 0.f, po + at_q,
                  s.wide());
        }
  }
  return {out, sums};
}

// Gradients [B, S, H, K] of the keys or values that each query head has seen, as those [B, S, J, K] of `given`.
Tensor Grouped(const Tensor& each, const Tensor& given, int64_t group) {
  if (group == 1) return each;
  Tensor sum = Like(given);
  const int64_t size = given.shape()[3], heads = given.numel() / size;
  const float* in = each.data<float>();
  float* out = sum.data<float>();
#pragma omp parallel for
  for (int64_t j = 0; j < heads; ++j)
    for (int64_t i = 0; i < size; ++i) {
      float total = 0.f;
      for (int64_t h = j * group; h < (j + 1) * group; ++h) total += in[h * size + i];
      out[j * size + i] = total;
    }
  return sum;
}

std::vector<Tensor> Backward(const Tensor& q, const Tensor& k, const Tensor& v, const paddle::optional<Tensor>& begins,
                             const Tensor& sums, const Tensor& d_out) {
  const Shape s = Read(q, k, v, begins);
  const Tensor d_whole = d_out.contiguous();
  const int64_t group = s.H / s.J;
  // every query head has keys of its own here, so that heads can be dealt to threads; those of a group are added up
  Tensor dq = Like(q), dk = Floats({s.B, s.S, s.H, s.K}, q), dv = Floats({s.B, s.S, s.H, s.K}, q);
  const float *pq = q.data<float>(), *pk = k.data<float>(), *pv = v.data<float>();
  const float *ps = sums.data<float>(), *pd = d_whole.data<float>();
  const int64_t* pb = begins ? begins->data<int64_t>() : nullptr;
  float *pdq = dq.data<float>(), *pdk = dk.data<float>(), *pdv = dv.data<float>();
  std::fill(pdk, pdk + dk.numel(), 0.f), std::fill(pdv, pdv + dv.numel(), 0.f);
  const float scale = 1.f / std::sqrt(static_cast<float>(s.K));
#pragma omp parallel
  {
    std::vector<float> weights(kBlock * s.S), slopes(kBlock * s.S);
#pragma omp for collapse(2) schedule(monotonic : dynamic)
    for (int64_t b = 0; b < s.B; ++b)
      for (int64_t h = 0; h < s.H; ++h)
        for (int64_t number = 0; number < s.blocks(); ++number) {
          const Block block(s, number, pb ? pb + b * s.L : nullptr);
          const int64_t n = block.keys(), rows = block.rows;
          const int64_t at_q = (b * s.L + block.first) * s.wide() + h * s.K;
          const int64_t at_k = (b * s.S + block.low) * s.narrow() + h / group * s.K;
          const int64_t at_dk = (b * s.S + block.low) * s.wide() + h * s.K;
          Product(kPlain, kTransposed, rows, n, s.K, scale, pq + at_q, s.wide(), pk + at_k, s.narrow(), 0.f,
                  weights.data(), n);
          Product(kPlain, kTransposed, rows, n, s.K, 1.f, pd + at_q, s.wide(), pv + at_k, s.narrow(), 0.f,
                  slopes.data(), n);
          for (int64_t r = 0; r < rows; ++r) {
            float *weight = weights.data() + r * n, *slope = slopes.data() + r * n;
            const float log_sum = ps[(b * s.H + h) * s.L + block.first + r];
            const int64_t from = block.from(r), to = block.to(r);
            float sum = 0.f, dot = 0.f;
#pragma omp simd reduction(+ : sum, dot)
            for (int64_t i = from; i < to; ++i) {
              weight[i] = Exp(weight[i] - log_sum);
              sum += weight[i], dot += weight[i] * slope[i];
            }
            // by the sums of these very numbers, not by 1 and d_out * out: so what has to cancel out does
            const float inverse = 1.f / sum, mean = dot * inverse;
#pragma omp simd
            for (int64_t i = from; i < to; ++i) {
              weight[i] *= inverse;
              slope[i] = weight[i] * (slope[i] - mean) * scale;
            }
            std::fill(weight, weight + from, 0.f), std::fill(weight + to, weight + n, 0.f);
            std::fill(slope, slope + from, 0.f), std::fill(slope + to, slope + n, 0.f);
          }
          Product(kTransposed, kPlain, n, s.K, rows, 1.f, weights.data(), n, pd + at_q, s.wide(), 1.f, pdv + at_dk,
                  s.wide());
          Product(kTransposed, kPlain, n, s.K, rows, 1.f, slopes.data(), n, pq + at_q, s.wide(), 1.f, pdk + at_dk,
                  s.wide());
          Product(kPlain, kPlain, rows, s.K, n, 1.f, slopes.data(), n, pk + at_k, s.narrow(), 0.f, pdq + at_q,
                  s.wide());
        }
  }
  return {dq, Grouped(dk, k, group), Grouped(dv, v, group)};
}

using Dims = std::vector<int64_t>;
std::vector<Dims> Shapes(const Dims& q, const Dims&, const Dims&, const paddle::optional<Dims>&) {
  return {q, {q[0], q[2], q[1]}};
}
using Type = paddle::DataType;
std::vector<Type> Types(const Type& q, const Type&, const Type&, const paddle::optional<Type>&) { return {q, q}; }

}  // namespace

PD_BUILD_OP(llmsuite_attention)
    .Inputs({"q", "k", "v", paddle::Optional("begins")})
    .Outputs({"out", "sums"})
    .SetKernelFn(PD_KERNEL(Forward))
    .SetInferShapeFn(PD_INFER_SHAPE(Shapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(Types));
PD_BUILD_GRAD_OP(llmsuite_attention)
    .Inputs({"q", "k", "v", paddle::Optional("begins"), "sums", paddle::Grad("out")})
    .Outputs({paddle::Grad("q"), paddle::Grad("k"), paddle::Grad("v")})
    .SetKernelFn(PD_KERNEL(Backward));
