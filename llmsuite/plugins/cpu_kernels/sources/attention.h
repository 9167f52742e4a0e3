// What the kernels for attention share: causal attention by blocks of queries (FlashAttention, Dao et al. 2022, arXiv
// 2205.14135; no blocks of keys). Scores exist for one block of one head at a time, keys outside a block's mask are
// skipped, and the backward pass recomputes the scores from the saved log-sum-exp. Heads stay where the projections
// wrote them.
//
// Shapes: B batch, L queries, S keys, H query heads, J key-value heads, K head size. Query i of a row attends to
// keys 0 to i + S - L. With spans [B, 3, L]: to [spans[b, 0, i], spans[b, 1, i]) and to [spans[b, 2, i], i + S - L].
// Spans [1, 3, L] are those of all rows.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>

#include "common.h"
#include "rounding.h"

namespace {

constexpr int64_t kBlock = 64;

struct Shape {
  int64_t B, L, S, H, J, K;
  int64_t narrow = J * K;                    // between two keys, and two values
  int64_t head_step = K, row_step = S * narrow;  // between those of two heads, and of two rows
  int64_t spans_step = 0;                    // between the spans of two rows
  int64_t wide() const { return H * K; }     // between two queries
  int64_t key(int64_t b, int64_t j, int64_t number) const { return b * row_step + j * head_step + number * narrow; }
  int64_t blocks() const { return (L + kBlock - 1) / kBlock; }
};

void ReadSpans(Shape& s, const paddle::optional<Tensor>& spans) {
  if (!spans) return;
  PD_CHECK(spans->dtype() == paddle::DataType::INT64 && spans->is_contiguous(), "spans: int64, without gaps");
  const bool is_one = spans->shape()[0] == 1;
  PD_CHECK(spans->numel() == (is_one ? 1 : s.B) * 3 * s.L, "spans: [B, 3, L] or [1, 3, L]");
  s.spans_step = is_one ? 0 : 3 * s.L;
}

// Of tensors of any one type.
Shape ShapeOf(const Tensor& q, const Tensor& k, const Tensor& v, const paddle::optional<Tensor>& spans) {
  Shape s{q.shape()[0], q.shape()[1], k.shape()[1], q.shape()[2], k.shape()[2], q.shape()[3]};
  PD_CHECK(k.shape() == v.shape() && s.H % s.J == 0 && s.L <= s.S, "q, k and v do not fit together");
  PD_CHECK(q.is_contiguous() && k.is_contiguous() && v.is_contiguous(), "q, k or v has gaps");
  ReadSpans(s, spans);
  return s;
}

// Of the first `num_keys` positions of a cache, keys and values [B, J, C, K]. It is given whole: Paddle copies a view with
// gaps before it calls a custom operator, 30 ms for 14,000 positions of 128 numbers.
Shape CacheShape(const Tensor& q, const Tensor& keys, const Tensor& values, const paddle::optional<Tensor>& spans,
                 int64_t num_keys) {
  const int64_t heads = keys.shape()[1], room = keys.shape()[2], size = keys.shape()[3];
  Shape s{q.shape()[0], q.shape()[1], num_keys, q.shape()[2], heads, q.shape()[3]};
  PD_CHECK(keys.shape() == values.shape() && s.H % s.J == 0 && s.L <= s.S && s.S <= room && s.K == size,
           "q, keys and values do not fit together");
  PD_CHECK(q.is_contiguous() && keys.is_contiguous() && values.is_contiguous(), "q, keys or values have gaps");
  s.narrow = size, s.head_step = room * size, s.row_step = heads * room * size;
  ReadSpans(s, spans);
  return s;
}

Shape Read(const Tensor& q, const Tensor& k, const Tensor& v, const paddle::optional<Tensor>& spans) {
  for (const Tensor* x : {&q, &k, &v}) PD_CHECK(x->dtype() == paddle::DataType::FLOAT32, "q, k and v are float32");
  return ShapeOf(q, k, v, spans);
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

  // A run begins and ends at multiples of `unit`, so the last one may end after the last key.
  Block(const Shape& s, int64_t number, const int64_t* spans_of_row, int64_t unit = 1)
      : first(number * kBlock), rows(std::min(kBlock, s.L - first)), shift_(s.S - s.L), length_(s.L) {
    spans_ = spans_of_row ? spans_of_row + first : nullptr;
    Range &apart = runs[0], &own = runs[1];
    own = {spans_ ? first + shift_ : 0, first + rows + shift_};
    for (int64_t r = 0; spans_ && r < rows; ++r) {
      const auto [document, part] = Seen(r);
      own.from = std::min(own.from, part.from);
      if (document.size() > 0 && apart.size() > 0)
        apart = {std::min(apart.from, document.from), std::max(apart.to, document.to)};
      else if (document.size() > 0)
        apart = document;
    }
    for (Range& run : runs) run = {run.from / unit * unit, (run.to + unit - 1) / unit * unit};
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
    const int64_t itself = first + r + shift_;
    const int64_t own = std::clamp<int64_t>(spans_[2 * length_ + r], 0, itself);
    const int64_t from = std::clamp<int64_t>(spans_[r], 0, own);
    return {Range{from, std::clamp<int64_t>(spans_[length_ + r], from, own)}, Range{own, itself + 1}};
  }
  Range Placed(const Range& keys) const {
    if (keys.size() == 0) return {0, 0};
    const int run = keys.from < runs[0].to ? 0 : 1;
    const int64_t moved = at(run) - runs[run].from;
    return {keys.from + moved, keys.to + moved};
  }
};

// Fills the scores of a row that lie outside both ranges.
void FillOthers(float* row, int64_t size, const std::array<Range, 2>& seen, float value) {
  std::fill(row, row + seen[0].from, value);
  std::fill(row + seen[0].to, row + seen[1].from, value);
  std::fill(row + seen[1].to, row + size, value);
}

typedef float Lanes __attribute__((vector_size(64), aligned(4), may_alias));

// The largest of some numbers and of `most`. (GCC 12 makes no vectors of a loop with max.)
inline float Largest(const float* x, int64_t count, float most) {
  constexpr int kLanes = sizeof(Lanes) / sizeof(float);
  Lanes lanes = Lanes{} + most;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Lanes& next = *reinterpret_cast<const Lanes*>(x + i);
    lanes = next > lanes ? next : lanes;
  }
  for (; i < count; ++i) most = std::max(most, x[i]);
  for (int j = 0; j < kLanes; ++j) most = std::max(most, lanes[j]);
  return most;
}

// Makes the products of a row its weights times their sum, which is returned. Scores are products times `scale`;
// `highest` is the largest one.
inline float Exponentials(float* row, const std::array<Range, 2>& seen, float scale, float& highest) {
  float most = row[seen[1].from], sum = 0.f;
  for (const auto [from, to] : seen) most = Largest(row + from, to - from, most);
  for (const auto [from, to] : seen)
#pragma omp simd reduction(+ : sum)
    for (int64_t i = from; i < to; ++i) sum += row[i] = Exp(scale * (row[i] - most));
  highest = scale * most;
  return sum;
}

// Makes the products of a row its weights, and the gradients of the weights those of the products.
inline void Slopes(float* weight, float* slope, const std::array<Range, 2>& seen, float scale, float log_sum) {
  float sum = 0.f, dot = 0.f;
  for (const auto [from, to] : seen)
#pragma omp simd reduction(+ : sum, dot)
    for (int64_t i = from; i < to; ++i) {
      weight[i] = Exp(scale * weight[i] - log_sum);
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
}

// Sums gradients [B, S, H, K] in float32, one per query head, over the heads of a group into [B, S, J, K], the shape and
// the type of `given`.
template <typename T = float>
Tensor Grouped(const Tensor& each, const Tensor& given, int64_t group) {
  if (group == 1) return each;
  Tensor sum = Like(given);
  const int64_t size = given.shape()[3], heads = given.numel() / size;
  const float* in = each.data<float>();
  T* out = static_cast<T*>(sum.data());
#pragma omp parallel for
  for (int64_t j = 0; j < heads; ++j)
    for (int64_t i = 0; i < size; ++i) {
      float total = 0.f;
      for (int64_t h = j * group; h < (j + 1) * group; ++h) total += in[h * size + i];
      rounding::Put(total, out[j * size + i]);
    }
  return sum;
}

using Dims = std::vector<int64_t>;
std::vector<Dims> Shapes(const Dims& q, const Dims&, const Dims&, const paddle::optional<Dims>&) {
  return {q, {q[0], q[2], q[1]}};
}
std::vector<Dims> CachedShapes(const Dims& q, const Dims&, const Dims&, const Dims&) { return {q}; }
using Type = paddle::DataType;
std::vector<Type> CachedTypes(const Type& q, const Type&, const Type&, const Type&) { return {q}; }
std::vector<Type> Types(const Type& q, const Type&, const Type&, const paddle::optional<Type>&) {
  return {q, Type::FLOAT32};
}

}  // namespace
