// Attention in float32, by products of MKL's: see attention.h.
#include "attention.h"

extern "C" void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float* a,
                            int lda, const float* b, int ldb, float beta, float* c, int ldc);

namespace {

constexpr int kRowMajor = 101, kPlain = 111, kTransposed = 112;

void Product(int ta, int tb, int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda, const float* b,
             int64_t ldb, float beta, float* c, int64_t ldc) {
  cblas_sgemm(kRowMajor, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

std::vector<Tensor> Attend(const Shape& s, const Tensor& q, const Tensor& k, const Tensor& v,
                           const paddle::optional<Tensor>& spans) {
  Tensor out = Like(q), sums = Floats({s.B, s.H, s.L}, q);
  const float *pq = q.data<float>(), *pk = k.data<float>(), *pv = v.data<float>();
  const int64_t* pb = spans ? spans->data<int64_t>() : nullptr;
  float *po = out.data<float>(), *ps = sums.data<float>();
  const float scale = 1.f / std::sqrt(static_cast<float>(s.K));
#pragma omp parallel
  {
    std::vector<float> scores(std::min(kBlock, s.L) * s.S);
#pragma omp for collapse(3) schedule(monotonic : dynamic)
    for (int64_t b = 0; b < s.B; ++b)
      for (int64_t h = 0; h < s.H; ++h)
        for (int64_t number = s.blocks() - 1; number >= 0; --number) {  // the longest first
          const Block block(s, number, pb ? pb + b * s.spans_step : nullptr);
          const int64_t n = block.keys(), j = h / (s.H / s.J);
          const int64_t at_q = (b * s.L + block.first) * s.wide() + h * s.K;
          for (int run = 0; run < 2; ++run) {
            const Range& keys = block.runs[run];
            const int64_t at_k = s.key(b, j, keys.from);
            if (keys.size() == 0) continue;
            Product(kPlain, kTransposed, block.rows, keys.size(), s.K, 1.f, pq + at_q, s.wide(), pk + at_k,
                    s.narrow, 0.f, scores.data() + block.at(run), n);
          }
          for (int64_t r = 0; r < block.rows; ++r) {
            float* row = scores.data() + r * n;
            const std::array<Range, 2> seen = block.Scores(r);
            float highest;
            const float sum = Exponentials(row, seen, scale, highest), inverse = 1.f / sum;
            for (const auto [from, to] : seen)
#pragma omp simd
              for (int64_t i = from; i < to; ++i) row[i] *= inverse;
            FillOthers(row, n, seen, 0.f);
            ps[(b * s.H + h) * s.L + block.first + r] = highest + std::log(sum);
          }
          for (int run = 0; run < 2; ++run) {
            const Range& keys = block.runs[run];
            const int64_t at_k = s.key(b, j, keys.from);
            if (keys.size() == 0) continue;
            Product(kPlain, kPlain, block.rows, s.K, keys.size(), 1.f, scores.data() + block.at(run), n, pv + at_k,
                    s.narrow, block.at(run) ? 1.f : 0.f, po + at_q, s.wide());
          }
        }
  }
  return {out, sums};
}

std::vector<Tensor> Forward(const Tensor& q, const Tensor& k, const Tensor& v,
                            const paddle::optional<Tensor>& spans) {
  return Attend(Read(q, k, v, spans), q, k, v, spans);
}

std::vector<Tensor> Cached(const Tensor& q, const Tensor& keys, const Tensor& values, const Tensor& spans,
                           int64_t num_keys) {
  for (const Tensor* x : {&q, &keys, &values})
    PD_CHECK(x->dtype() == paddle::DataType::FLOAT32, "q, keys and values are float32");
  return {Attend(CacheShape(q, keys, values, spans, num_keys), q, keys, values, spans)[0]};
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
            const int64_t at_k = s.key(b, h / group, keys.from);
            if (keys.size() == 0) continue;
            Product(kPlain, kTransposed, rows, keys.size(), s.K, 1.f, pq + at_q, s.wide(), pk + at_k, s.narrow, 0.f,
                    weights.data() + block.at(run), n);
            Product(kPlain, kTransposed, rows, keys.size(), s.K, 1.f, pd + at_q, s.wide(), pv + at_k, s.narrow, 0.f,
                    slopes.data() + block.at(run), n);
          }
          for (int64_t r = 0; r < rows; ++r) {
            float *weight = weights.data() + r * n, *slope = slopes.data() + r * n;
            const float log_sum = ps[(b * s.H + h) * s.L + block.first + r];
            const std::array<Range, 2> seen = block.Scores(r);
            Slopes(weight, slope, seen, scale, log_sum);
            FillOthers(weight, n, seen, 0.f), FillOthers(slope, n, seen, 0.f);
          }
          for (int run = 0; run < 2; ++run) {
            const Range& keys = block.runs[run];
            const int64_t at_k = s.key(b, h / group, keys.from);
            const int64_t at_dk = (b * s.S + keys.from) * s.wide() + h * s.K;
            const float *weight = weights.data() + block.at(run), *slope = slopes.data() + block.at(run);
            if (keys.size() == 0) continue;
            Product(kTransposed, kPlain, keys.size(), s.K, rows, 1.f, weight, n, pd + at_q, s.wide(), 1.f, pdv + at_dk,
                    s.wide());
            Product(kTransposed, kPlain, keys.size(), s.K, rows, 1.f, slope, n, pq + at_q, s.wide(), 1.f, pdk + at_dk,
                    s.wide());
            Product(kPlain, kPlain, rows, s.K, keys.size(), 1.f, slope, n, pk + at_k, s.narrow,
                    block.at(run) ? 1.f : 0.f, pdq + at_q, s.wide());
          }
        }
  }
  return {dq, Grouped(dk, k, group), Grouped(dv, v, group)};
}

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
PD_BUILD_OP(llmsuite_cached_attention)
    .Inputs({"q", "keys", "values", "spans"})
    .Outputs({"out"})
    .Attrs({"num_keys: int64_t"})
    .SetKernelFn(PD_KERNEL(Cached))
    .SetInferShapeFn(PD_INFER_SHAPE(CachedShapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(CachedTypes));
