// Causal attention by blocks of queries (FlashAttention, Dao et al. 2022, arXiv 2205.14135; no blocks of keys).
// Scores exist for one block of one head at a time, keys outside a block's mask are skipped, and the backward pass
// recomputes the scores from the saved log-sum-exp. Heads stay where the projections wrote them: nothing is transposed.
//
// Shapes: B batch, L queries, S keys, H query heads, J key-value heads, K head size. Query i of a row attends to
// keys 0 to i + S - L. With spans [B, 3, L], and as many queries as keys: to [spans[b, 0, i], spans[b, 1, i]) and to
// [spans[b, 2, i], i]. Spans [1, 3, L] are those of all rows.
#include <algorithm>
#include <array>
#include <cmath>

#include "common.h"

extern "C" void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float* a,
                            int lda, const float* b, int ldb, float beta, float* c, int ldc);

namespace {

constexpr int64_t kBlock = 64;
constexpr int kRowMajor = 101, kPlain = 111, kTransposed = 112;

struct Shape {
  int64_t B, L, S, H, J, K;
  int64_t spans_step = 0;                    // between the spans of two rows
  int64_t wide() const { return H * K; }     // between two queries
  int64_t narrow() const { return J * K; }   // between two keys
  int64_t blocks() const { return (L + kBlock - 1) / kBlock; }
};

Shape Read(const Tensor& q, const Tensor& k, const Tensor& v, const paddle::optional<Tensor>& spans) {
  Check(q, "q"), Check(k, "k"), Check(v, "v");
  Shape s{q.shape()[0], q.shape()[1], k.shape()[1], q.shape()[2], k.shape()[2], q.shape()[3]};
  PD_CHECK(k.shape() == v.shape() && s.H % s.J == 0 && s.L <= s.S, "q, k and v do not fit together");
  if (spans) {
    PD_CHECK(spans->dtype() == paddle::DataType::INT64 && spans->is_contiguous(), "spans: int64, without gaps");
    const bool is_one = spans->shape()[0] == 1;
    PD_CHECK(s.L == s.S && spans->numel() == (is_one ? 1 : s.B) * 3 * s.L,
             "spans: [B, 3, L] or [1, 3, L], of as many queries as keys");
    s.spans_step = is_one ? 0 : 3 * s.L;
  }
  return s;
}

// The half-open range [from, to).
struct Range {
  int64_t from, to;
  int64_t size() const { return to - from; }
};

// One block of queries of one head, and the keys that any of them attends to: one run of keys, or two separate ones
// whose scores are stored side by side.
class Block {
 public:
  int64_t first, rows;
  std::array<Range, 2> runs{};  // of keys; the first one may be empty

  Block(const Shape& s, int64_t number, const int64_t* spans_of_row)
      : first(number * kBlock), rows(std::min(kBlock, s.L - first)), shift_(s.S - s.L), length_(s.L) {
    spans_ = spans_of_row ? spans_of_row + first : nullptr;
    Range &apart = runs[0], &own = runs[1];
    own = {spans_ ? first : 0, first + rows + shift_};
    if (!spans_) return;
    for (int64_t r = 0; r < rows; ++r) {
      const auto [document, part] = Seen(r);
      own.from = std::min(own.from, part.from);
      if (document.size() > 0 && apart.size() > 0)
        apart = {std::min(apart.from, document.from), std::max(apart.to, document.to)};
      else if (document.size() > 0)
        apart = document;
    }
    if (apart.size() > 0 && apart.to >= own.from) own.from = std::min(own.from, apart.from), apart = {0, 0};
  }
  int64_t keys() const { return runs[0].size() + runs[1].size(); }
  // offset of a run's scores
  int64_t at(int run) const { return run ? runs[0].size() : 0; }
  // ranges of the block's scores that query r attends to; the first may be empty
  std::array<Range, 2> Scores(int64_t r) const {
    if (!spans_) return {Range{0, 0}, Range{0, first + r + shift_ + 1}};
    auto [document, part] = Seen(r);
    return {Placed(document), Placed(part)};
  }

 private:
  const int64_t* spans_;
  int64_t shift_, length_;

  std::array<Range, 2> Seen(int64_t r) const {
    const int64_t own = std::clamp<int64_t>(spans_[2 * length_ + r], 0, first + r);
    const int64_t from = std::clamp<int64_t>(spans_[r], 0, own);
    return {Range{from, std::clamp<int64_t>(spans_[length_ + r], from, own)}, Range{own, first + r + 1}};
  }
  Range Placed(const Range& keys) const {
    if (keys.size() == 0) return {0, 0};
    const int run = keys.from < runs[0].to ? 0 : 1;
    const int64_t moved = at(run) - runs[run].from;
    return {keys.from + moved, keys.to + moved};
  }
};

// Clears the scores of a row that lie outside both ranges.
void Clear(float* row, int64_t size, const std::array<Range, 2>& seen) {
  std::fill(row, row + seen[0].from, 0.f);
  std::fill(row + seen[0].to, row + seen[1].from, 0.f);
  std::fill(row + seen[1].to, row + size, 0.f);
}

void Product(int ta, int tb, int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda, const float* b,
             int64_t ldb, float beta, float* c, int64_t ldc) {
  cblas_sgemm(kRowMajor, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

std::vector<Tensor> Forward(const Tensor& q, const Tensor& k, const Tensor& v,
                            const paddle::optional<Tensor>& spans) {
  const Shape s = Read(q, k, v, spans);
  Tensor out = Like(q), sums = Floats({s.B, s.H, s.L}, q);
  const float *pq = q.data<float>(), *pk = k.data<float>(), *pv = v.data<float>();
  const int64_t* pb = spans ? spans->data<int64_t>() : nullptr;
  float *po = out.data<float>(), *ps = sums.data<float>();
  const float scale = 1.f / std::sqrt(static_cast<float>(s.K));
#pragma omp parallel
  {
    std::vector<float> scores(kBlock * s.S);
#pragma omp for collapse(3) schedule(monotonic : dynamic)
    for (int64_t b = 0; b < s.B; ++b)
      for (int64_t h = 0; h < s.H; ++h)
        for (int64_t number = s.blocks() - 1; number >= 0; --number) {  // the longest first
          const Block block(s, number, pb ? pb + b * s.spans_step : nullptr);
          const int64_t n = block.keys(), j = h / (s.H / s.J);
          const int64_t at_q = (b * s.L + block.first) * s.wide() + h * s.K;
          for (int run = 0; run < 2; ++run) {
            const Range& keys = block.runs[run];
            const int64_t at_k = (b * s.S + keys.from) * s.narrow() + j * s.K;
            if (keys.size() == 0) continue;
            Product(kPlain, kTransposed, block.rows, keys.size(), s.K, scale, pq + at_q, s.wide(), pk + at_k,
                    s.narrow(), 0.f, scores.data() + block.at(run), n);
          }
          for (int64_t r = 0; r < block.rows; ++r) {
            float* row = scores.data() + r * n;
            const std::array<Range, 2> seen = block.Scores(r);
            float highest = row[seen[1].from], sum = 0.f;
            for (const auto [from, to] : seen)
#pragma omp simd reduction(max : highest)
              for (int64_t i = from; i < to; ++i) highest = std::max(highest, row[i]);
            for (const auto [from, to] : seen)
#pragma omp simd reduction(+ : sum)
              for (int64_t i = from; i < to; ++i) sum += row[i] = Exp(row[i] - highest);
            const float inverse = 1.f / sum;
            for (const auto [from, to] : seen)
#pragma omp simd
              for (int64_t i = from; i < to; ++i) row[i] *= inverse;
            Clear(row, n, seen);
            ps[(b * s.H + h) * s.L + block.first + r] = highest + std::log(sum);
          }
          for (int run = 0; run < 2; ++run) {
            const Range& keys = block.runs[run];
            const int64_t at_k = (b * s.S + keys.from) * s.narrow() + j * s.K;
            if (keys.size() == 0) continue;
            Product(kPlain, kPlain, block.rows, s.K, keys.size(), 1.f, scores.data() + block.at(run), n, pv + at_k,
                    s.narrow(), block.at(run) ? 1.f : 0.f, po + at_q, s.wide());
          }
        }
  }
  return {out, sums};
}

// Sums gradients [B, S, H, K], one per query head, over the heads of a group into [B, S, J, K], the shape of `given`.
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

std::vector<Tensor> Backward(const Tensor& q, const Tensor& k, const Tensor& v, const paddle::optional<Tensor>& spans,
                             const Tensor& sums, const Tensor& d_out) {
  const Shape s = Read(q, k, v, spans);
  const Tensor d_whole = d_out.contiguous();
  const int64_t group = s.H / s.J;
  // one gradient per query head, so that threads can take heads without locks; heads of a group are summed
  Tensor dq = Like(q), dk = Floats({s.B, s.S, s.H, s.K}, q), dv = Floats({s.B, s.S, s.H, s.K}, q);
  const float *pq = q.data<float>(), *pk = k.data<float>(), *pv = v.data<float>();
  const float *ps = sums.data<float>(), *pd = d_whole.data<float>();
  const int64_t* pb = spans ? spans->data<int64_t>() : nullptr;
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
          const Block block(s, number, pb ? pb + b * s.spans_step : nullptr);
          const int64_t n = block.keys(), rows = block.rows;
          const int64_t at_q = (b * s.L + block.first) * s.wide() + h * s.K;
          for (int run = 0; run < 2; ++run) {
            const Range& keys = block.runs[run];
            const int64_t at_k = (b * s.S + keys.from) * s.narrow() + h / group * s.K;
            if (keys.size() == 0) continue;
            Product(kPlain, kTransposed, rows, keys.size(), s.K, scale, pq + at_q, s.wide(), pk + at_k, s.narrow(), 0.f,
                    weights.data() + block.at(run), n);
            Product(kPlain, kTransposed, rows, keys.size(), s.K, 1.f, pd + at_q, s.wide(), pv + at_k, s.narrow(), 0.f,
                    slopes.data() + block.at(run), n);
          }
          for (int64_t r = 0; r < rows; ++r) {
            float *weight = weights.data() + r * n, *slope = slopes.data() + r * n;
            const float log_sum = ps[(b * s.H + h) * s.L + block.first + r];
            const std::array<Range, 2> seen = block.Scores(r);
            float sum = 0.f, dot = 0.f;
            for (const auto [from, to] : seen)
#pragma omp simd reduction(+ : sum, dot)
              for (int64_t i = from; i < to; ++i) {
                weight[i] = Exp(weight[i] - log_sum);
                sum += weight[i], dot += weight[i] * slope[i];
              }
            // sums of these rounded numbers, not 1 and d_out * out: terms that must cancel then do
            const float inverse = 1.f / sum, mean = dot * inverse;
            for (const auto [from, to] : seen)
#pragma omp simd
              for (int64_t i = from; i < to; ++i) {
                weight[i] *= inverse;
                slope[i] = weight[i] * (slope[i] - mean) * scale;
              }
            Clear(weight, n, seen), Clear(slope, n, seen);
          }
          for (int run = 0; run < 2; ++run) {
            const Range& keys = block.runs[run];
            const int64_t at_k = (b * s.S + keys.from) * s.narrow() + h / group * s.K;
            const int64_t at_dk = (b * s.S + keys.from) * s.wide() + h * s.K;
            const float *weight = weights.data() + block.at(run), *slope = slopes.data() + block.at(run);
            if (keys.size() == 0) continue;
            Product(kTransposed, kPlain, keys.size(), s.K, rows, 1.f, weight, n, pd + at_q, s.wide(), 1.f, pdv + at_dk,
                    s.wide());
            Product(kTransposed, kPlain, keys.size(), s.K, rows, 1.f, slope, n, pq + at_q, s.wide(), 1.f, pdk + at_dk,
                    s.wide());
            Product(kPlain, kPlain, rows, s.K, keys.size(), 1.f, slope, n, pk + at_k, s.narrow(),
                    block.at(run) ? 1.f : 0.f, pdq + at_q, s.wide());
          }
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
    .Inputs({"q", "k", "v", paddle::Optional("spans")})
    .Outputs({"out", "sums"})
    .SetKernelFn(PD_KERNEL(Forward))
    .SetInferShapeFn(PD_INFER_SHAPE(Shapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(Types));
PD_BUILD_GRAD_OP(llmsuite_attention)
    .Inputs({"q", "k", "v", paddle::Optional("spans"), "sums", paddle::Grad("out")})
    .Outputs({paddle::Grad("q"), paddle::Grad("k"), paddle::Grad("v")})
    .SetKernelFn(PD_KERNEL(Backward));
