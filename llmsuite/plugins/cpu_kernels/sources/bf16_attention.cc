// Attention whose products are of inputs rounded to bfloat16, with float32 sums: queries, keys, values, weights and
// their gradients. All else is float32: see attention.h. Tensors are float32, or all of them bfloat16: then outputs and
// gradients are rounded once, where they are complete.
#include "attention.h"
#include "packing.h"

namespace {

using tiles::Multiplier;
using tiles::Scratch;

// Scores of keys that a token does not see: their weights are 0, so loops over whole rows need no exceptions.
constexpr float kUnseen = -INFINITY;
std::array<Range, 2> All(int64_t keys) { return {Range{0, 0}, Range{0, keys}}; }

int64_t Heads(const Shape& s) { return s.B * s.J; }

void CheckTypes(const Tensor& q, const Tensor& k, const Tensor& v) {
  PD_CHECK(rounding::IsBf16(q) == rounding::IsBf16(k) && rounding::IsBf16(q) == rounding::IsBf16(v),
           "q, k and v differ in type");
}
Shape ReadEither(const Tensor& q, const Tensor& k, const Tensor& v, const paddle::optional<Tensor>& spans) {
  CheckTypes(q, k, v);
  return ShapeOf(q, k, v, spans);
}

template <typename T>
const T* Numbers(const Tensor& x) {
  return static_cast<const T*>(x.data());
}
template <typename T>
T* Numbers(Tensor& x) {
  return static_cast<T*>(x.data());
}

// Keys or values as the products take them, one head after the other.
class Packed {
 public:
  explicit Packed(const Shape& s) : shape(s) {}
  const Shape& shape;
  const int64_t size = tiles::Whole(shape.K), keys = tiles::Whole(shape.S);
  const int64_t turned_lead = tiles::Lead(keys, 4), lead = tiles::Lead(size, 4);
  const int64_t turned_size = size / 2 * turned_lead, pairs_size = keys / 2 * lead;  // of a head

  // [K, S] in pairs of rows: for scores
  template <typename T>
  void Turned(const T* x, uint32_t* to) const {
#pragma omp parallel
    {
      const int64_t rows_lead = tiles::Lead(size, 2);
      Scratch<uint16_t> rows(keys * rows_lead);
#pragma omp for
      for (int64_t head = 0; head < Heads(shape); ++head) {
        tiles::Rows(Of(x, head), shape.narrow, shape.S, shape.K, rows.data(), rows_lead, keys, size);
        tiles::Turn(reinterpret_cast<const uint32_t*>(rows.data()), rows_lead / 2, keys, size / 2,
                    to + head * turned_size, turned_lead);
      }
    }
  }
  // [S, K] in pairs of rows: for sums over keys
  template <typename T>
  void Pairs(const T* x, uint32_t* to) const {
#pragma omp parallel for
    for (int64_t head = 0; head < Heads(shape); ++head)
      tiles::Pairs(Of(x, head), shape.narrow, shape.S, shape.K, to + head * pairs_size, lead, keys, size);
  }

 private:
  template <typename T>
  const T* Of(const T* x, int64_t head) const {
    return x + shape.key(head / shape.J, head % shape.J, 0);
  }
};

const uint16_t* Halves(const uint32_t* pairs) { return reinterpret_cast<const uint16_t*>(pairs); }

template <typename T>
std::vector<Tensor> Attend(const Shape& s, const Tensor& q, const Tensor& k, const Tensor& v,
                           const paddle::optional<Tensor>& spans) {
  const Packed packed(s);
  Tensor out = Like(q), sums = rounding::New({s.B, s.H, s.L}, paddle::DataType::FLOAT32, q);
  const T* pq = Numbers<T>(q);
  const int64_t* pb = spans ? spans->data<int64_t>() : nullptr;
  T* po = Numbers<T>(out);
  float* ps = sums.data<float>();
  const float scale = 1.f / std::sqrt(static_cast<float>(s.K));
  Scratch<uint32_t> turned(Heads(s) * packed.turned_size), values(Heads(s) * packed.pairs_size);
  packed.Turned(Numbers<T>(k), turned.data()), packed.Pairs(Numbers<T>(v), values.data());
  const int64_t size = packed.size, q_lead = tiles::Lead(size, 2), out_lead = tiles::Lead(size, 4);
  const int64_t lead = tiles::Lead(packed.keys, 4), w_lead = tiles::Lead(packed.keys, 2);
#pragma omp parallel
  {
    const Multiplier multiply;
    Scratch<float> scores(kBlock * lead), found(kBlock * out_lead);
    Scratch<uint16_t> queries(kBlock * q_lead), weights(kBlock * w_lead);
    float inverse[kBlock];
#pragma omp for collapse(3) schedule(monotonic : dynamic)
    for (int64_t b = 0; b < s.B; ++b)
      for (int64_t h = 0; h < s.H; ++h)
        for (int64_t number = s.blocks() - 1; number >= 0; --number) {  // the longest first
          const Block block(s, number, pb ? pb + b * s.spans_step : nullptr, tiles::kStep);
          const int64_t n = block.keys(), rows = tiles::Whole(block.rows), head = b * s.J + h / (s.H / s.J);
          const int64_t at_q = (b * s.L + block.first) * s.wide() + h * s.K;
          tiles::Rows(pq + at_q, s.wide(), block.rows, s.K, queries.data(), q_lead, rows, size);
          for (int run = 0; run < 2; ++run)
            multiply(rows, block.runs[run].size(), size, queries.data(), q_lead,
                     Halves(turned.data() + head * packed.turned_size + block.runs[run].from), packed.turned_lead,
                     scores.data() + block.at(run), lead, false);
          for (int64_t r = 0; r < rows; ++r) {
            float* row = scores.data() + r * lead;
            if (r < block.rows) {
              FillOthers(row, n, block.Scores(r), kUnseen);
              float highest;
              const float sum = Exponentials(row, All(n), scale, highest);
              inverse[r] = 1.f / sum;
              ps[(b * s.H + h) * s.L + block.first + r] = highest + std::log(sum);
            } else {
              std::fill(row, row + n, 0.f);
            }
            tiles::Round(row, n, weights.data() + r * w_lead);
          }
          for (int run = 0; run < 2; ++run)
            multiply(rows, size, block.runs[run].size(), weights.data() + block.at(run), w_lead,
                     Halves(values.data() + head * packed.pairs_size + block.runs[run].from / 2 * packed.lead),
                     packed.lead, found.data(), out_lead, run > 0);
          for (int64_t r = 0; r < block.rows; ++r) {
            float* row = found.data() + r * out_lead;
            for (int64_t i = 0; i < s.K; ++i) row[i] *= inverse[r];
            tiles::Round(row, s.K, po + at_q + r * s.wide());
          }
        }
  }
  return {out, sums};
}

// What a thread needs for the backward pass of a head.
struct Work {
  const int64_t size, keys, q_lead, t_lead, lead, w_lead, out_lead;
  Scratch<uint16_t> queries, d_outs, turned_queries, turned_d_outs, rows;
  Scratch<uint32_t> weights, slopes;
  Scratch<float> scores, d_scores, dq, dk, dv;

  explicit Work(const Packed& packed)
      : size(packed.size), keys(packed.keys), q_lead(tiles::Lead(size, 2)), t_lead(tiles::Lead(kBlock, 2)),
        lead(tiles::Lead(keys, 4)), w_lead(tiles::Lead(keys, 2)), out_lead(tiles::Lead(size, 4)),
        queries(kBlock * q_lead), d_outs(kBlock * q_lead), turned_queries(size * t_lead), turned_d_outs(size * t_lead),
        rows(kBlock * w_lead), weights(kBlock / 2 * lead), slopes(kBlock / 2 * lead), scores(kBlock * lead),
        d_scores(kBlock * lead), dq(kBlock * out_lead), dk(size * lead), dv(size * lead) {}

  // One block of queries or of their outputs' gradients, in rows and turned.
  template <typename T>
  void Read(const T* x, int64_t step, int64_t count, int64_t whole, int64_t K, const Scratch<uint16_t>& in_rows,
            const Scratch<uint16_t>& turned) const {
    tiles::Rows(x, step, count, K, in_rows.data(), q_lead, whole, size);
    tiles::Turn(in_rows.data(), q_lead, whole, size, turned.data(), t_lead);
  }

  // The block's products and gradients of its weights, which are in `scores` and `d_scores`, as weights and gradients of
  // products, rounded, as the next products take them.
  void Weigh(const Block& block, int64_t whole, float scale, const float* log_sums) const {
    const int64_t n = block.keys();
    for (int64_t r = 0; r < whole; ++r) {
      float *weight = scores.data() + r * lead, *slope = d_scores.data() + r * lead;
      if (r < block.rows) {
        FillOthers(weight, n, block.Scores(r), kUnseen);
        Slopes(weight, slope, All(n), scale, log_sums[r]);
      } else {
        std::fill(weight, weight + n, 0.f), std::fill(slope, slope + n, 0.f);
      }
    }
    tiles::Pairs(scores.data(), lead, whole, n, weights.data(), lead, whole, n);
    tiles::Pairs(d_scores.data(), lead, whole, n, slopes.data(), lead, whole, n);
    tiles::Rows(d_scores.data(), lead, whole, n, rows.data(), w_lead, whole, n);
  }
};

// The gradients of the keys or values of one head, [K, S], to rows [S, K] of all heads.
template <typename T>
void TurnRounded(const float* x, int64_t lead, const Shape& s, T* to) {
  constexpr int64_t kKeys = 64;
  float rows[kKeys * kKeys];
  for (int64_t first = 0; first < s.S; first += kKeys)
    for (int64_t at = 0; at < s.K; at += kKeys) {
      const int64_t keys = std::min(kKeys, s.S - first), size = std::min(kKeys, s.K - at);
      tiles::Turn(x + at * lead + first, lead, size, keys, rows, kKeys);
      for (int64_t i = 0; i < keys; ++i) tiles::Round(rows + i * kKeys, size, to + (first + i) * s.wide() + at);
    }
}

template <typename T>
std::vector<Tensor> BackwardOf(const Tensor& q, const Tensor& k, const Tensor& v, const paddle::optional<Tensor>& spans,
                               const Tensor& sums, const Tensor& d_out) {
  const Shape s = ReadEither(q, k, v, spans);
  const Packed packed(s);
  const Tensor d_whole = d_out.contiguous();
  const int64_t group = s.H / s.J;
  PD_CHECK(rounding::IsBf16(q) == rounding::IsBf16(d_whole), "a gradient of another type");
  // one gradient per query head, so that threads can take heads without locks; heads of a group are summed, in float32
  const auto type = group == 1 ? q.dtype() : paddle::DataType::FLOAT32;
  Tensor dq = Like(q), dk = rounding::New({s.B, s.S, s.H, s.K}, type, q), dv = Like(dk);
  const T *pq = Numbers<T>(q), *pd = Numbers<T>(d_whole);
  const float* ps = sums.data<float>();
  const int64_t* pb = spans ? spans->data<int64_t>() : nullptr;
  T* pdq = Numbers<T>(dq);
  const float scale = 1.f / std::sqrt(static_cast<float>(s.K));
  Scratch<uint32_t> keys(Heads(s) * packed.turned_size), values(Heads(s) * packed.turned_size);
  Scratch<uint32_t> key_pairs(Heads(s) * packed.pairs_size);
  packed.Turned(Numbers<T>(k), keys.data()), packed.Turned(Numbers<T>(v), values.data());
  packed.Pairs(Numbers<T>(k), key_pairs.data());
#pragma omp parallel
  {
    const Multiplier multiply;
    const Work work(packed);
    const int64_t size = work.size, lead = work.lead;
#pragma omp for collapse(2) schedule(monotonic : dynamic)
    for (int64_t b = 0; b < s.B; ++b)
      for (int64_t h = 0; h < s.H; ++h) {
        const int64_t head = b * s.J + h / group;
        std::fill(work.dk.data(), work.dk.data() + size * lead, 0.f);
        std::fill(work.dv.data(), work.dv.data() + size * lead, 0.f);
        for (int64_t number = 0; number < s.blocks(); ++number) {
          const Block block(s, number, pb ? pb + b * s.spans_step : nullptr, tiles::kStep);
          const int64_t whole = tiles::Whole(block.rows);
          const int64_t at_q = (b * s.L + block.first) * s.wide() + h * s.K;
          work.Read(pq + at_q, s.wide(), block.rows, whole, s.K, work.queries, work.turned_queries);
          work.Read(pd + at_q, s.wide(), block.rows, whole, s.K, work.d_outs, work.turned_d_outs);
          for (int run = 0; run < 2; ++run) {
            const int64_t from = head * packed.turned_size + block.runs[run].from, at = block.at(run);
            const int64_t count = block.runs[run].size();
            multiply(whole, count, size, work.queries.data(), work.q_lead, Halves(keys.data() + from),
                     packed.turned_lead, work.scores.data() + at, lead, false);
            multiply(whole, count, size, work.d_outs.data(), work.q_lead, Halves(values.data() + from),
                     packed.turned_lead, work.d_scores.data() + at, lead, false);
          }
          work.Weigh(block, whole, scale, ps + (b * s.H + h) * s.L + block.first);
          for (int run = 0; run < 2; ++run) {
            const auto [from, to] = block.runs[run];
            const int64_t at = block.at(run), count = to - from;
            multiply(size, count, whole, work.turned_d_outs.data(), work.t_lead, Halves(work.weights.data() + at), lead,
                     work.dv.data() + from, lead, true);
            multiply(size, count, whole, work.turned_queries.data(), work.t_lead, Halves(work.slopes.data() + at), lead,
                     work.dk.data() + from, lead, true);
            multiply(whole, size, count, work.rows.data() + at, work.w_lead,
                     Halves(key_pairs.data() + head * packed.pairs_size + from / 2 * packed.lead), packed.lead,
                     work.dq.data(), work.out_lead, run > 0);
          }
          for (int64_t r = 0; r < block.rows; ++r)
            tiles::Round(work.dq.data() + r * work.out_lead, s.K, pdq + at_q + r * s.wide());
        }
        const int64_t at = b * s.S * s.wide() + h * s.K;
        if (type == paddle::DataType::FLOAT32) {
          tiles::Turn(work.dk.data(), lead, s.K, s.S, dk.data<float>() + at, s.wide());
          tiles::Turn(work.dv.data(), lead, s.K, s.S, dv.data<float>() + at, s.wide());
        } else {
          TurnRounded(work.dk.data(), lead, s, Numbers<T>(dk) + at);
          TurnRounded(work.dv.data(), lead, s, Numbers<T>(dv) + at);
        }
      }
  }
  return {dq, Grouped<T>(dk, k, group), Grouped<T>(dv, v, group)};
}

std::vector<Tensor> Forward(const Tensor& q, const Tensor& k, const Tensor& v,
                            const paddle::optional<Tensor>& spans) {
  return (rounding::IsBf16(q) ? Attend<uint16_t> : Attend<float>)(ReadEither(q, k, v, spans), q, k, v, spans);
}
std::vector<Tensor> Cached(const Tensor& q, const Tensor& keys, const Tensor& values, const Tensor& spans,
                           int64_t num_keys) {
  CheckTypes(q, keys, values);
  const Shape s = CacheShape(q, keys, values, spans, num_keys);
  return {(rounding::IsBf16(q) ? Attend<uint16_t> : Attend<float>)(s, q, keys, values, spans)[0]};
}
std::vector<Tensor> Backward(const Tensor& q, const Tensor& k, const Tensor& v, const paddle::optional<Tensor>& spans,
                             const Tensor& sums, const Tensor& d_out) {
  return (rounding::IsBf16(q) ? BackwardOf<uint16_t> : BackwardOf<float>)(q, k, v, spans, sums, d_out);
}

}  // namespace

PD_BUILD_OP(llmsuite_bf16_attention)
    .Inputs({"q", "k", "v", paddle::Optional("spans")})
    .Outputs({"out", "sums"})
    .SetKernelFn(PD_KERNEL(Forward))
    .SetInferShapeFn(PD_INFER_SHAPE(Shapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(Types));
PD_BUILD_GRAD_OP(llmsuite_bf16_attention)
    .Inputs({"q", "k", "v", paddle::Optional("spans"), "sums", paddle::Grad("out")})
    .Outputs({paddle::Grad("q"), paddle::Grad("k"), paddle::Grad("v")})
    .SetKernelFn(PD_KERNEL(Backward));
PD_BUILD_OP(llmsuite_bf16_cached_attention)
    .Inputs({"q", "keys", "values", "spans"})
    .Outputs({"out"})
    .Attrs({"num_keys: int64_t"})
    .SetKernelFn(PD_KERNEL(Cached))
    .SetInferShapeFn(PD_INFER_SHAPE(CachedShapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(CachedTypes));
