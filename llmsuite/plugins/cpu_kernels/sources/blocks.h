// Sums of products of matrices, computed block by block with tiles.h:
//   c [m, n] = a [m, k] b [k, n] for one pair of a and b or several; sums are float32
// Inputs are rounded to bfloat16, or split into three parts of it, which are all of a float32 number.
// A thread computes a rectangle of c, in blocks whose sums stay in its cache, kDepth of k at a time. The matching part
// of b stays there too, in pairs of rows, while rows of a are read. A block is written to memory once. The order in
// which an element is summed depends only on each k: it is the same for any other rows and columns, and any number of
// threads.
#pragma once
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "packing.h"
#include "parts.h"

namespace blocks {

// These sizes were the best on a Xeon with AMX, whose cores have 2 MB of second-level cache.
template <int kParts>
struct Sizes {
  static constexpr int64_t kDepth = 256;
  static constexpr int64_t kKept = 1 << 19;  // numbers of parts of b that are kept for all rows of a thread
};
template <>
struct Sizes<3> {
  // The parts of kStep rows of a and of as many columns of b are half of a first-level cache of 48 KB. At 128 they are
  // all of it, and push each other out.
  static constexpr int64_t kDepth = 64;
  static constexpr int64_t kKept = 1 << 18;
};
constexpr int64_t kColumns = 512;
constexpr int64_t kRows = 64, kMany = 512;  // of a block, where b is kept, and where it is made for each block
constexpr int64_t kPast = 1 << 20;  // bytes of c from which it is written past the caches, which it would fill

// A factor as it lies in memory: rows `lead` elements apart, or those of its transpose.
struct Matrix {
  const void* data;
  bool is_float;  // or bfloat16
  int64_t lead;
  bool is_turned;

  template <typename T>
  const T* At(int64_t row, int64_t column) const {
    return static_cast<const T*>(data) + (is_turned ? column * lead + row : row * lead + column);
  }
};

struct Pair {
  Matrix a, b;  // where they are rounded, a is that already; where they are split, both are float32
  int64_t k;
};

// c, in rows without gaps.
struct Result {
  void* data;
  bool is_float;  // or bfloat16
};

// Memory of a thread, from one product to the next: taken anew it would be faulted in page by page.
class Room {
 public:
  template <typename T>
  T* For(int64_t count) {
    const int64_t bytes = count * sizeof(T);
    if (bytes > bytes_) memory_ = std::make_unique<tiles::Scratch<char>>(bytes), bytes_ = bytes;
    return reinterpret_cast<T*>(memory_->data());
  }

 private:
  std::unique_ptr<tiles::Scratch<char>> memory_;
  int64_t bytes_ = 0;
};

// A number in pieces of one size, a multiple of kStep, but for the last one.
struct Pieces {
  int64_t size, count;
  Pieces(int64_t total, int64_t wanted)
      : size(tiles::Whole((total + wanted - 1) / wanted)), count((total + size - 1) / size) {}
  static Pieces OfAtMost(int64_t most, int64_t total) { return Pieces(total, (total + most - 1) / most); }
};

// A piece of a pair that is multiplied at a time.
struct Slice {
  const Pair* pair;
  int64_t from, count;  // of k
  int64_t at;           // rows, multiples of kStep, of the slices in front of it
};

template <int kParts>
struct Slices {
  using Size = Sizes<kParts>;
  std::vector<Slice> all;
  int64_t rows = 0;  // of all, multiples of kStep

  explicit Slices(const std::vector<Pair>& pairs) {
    for (const Pair& pair : pairs) {
      const Pieces deep = Pieces::OfAtMost(Size::kDepth, pair.k);
      for (int64_t from = 0; from < pair.k; from += deep.size) {
        const int64_t count = std::min(deep.size, pair.k - from);
        all.push_back({&pair, from, count, rows});
        rows += tiles::Whole(count);
      }
    }
  }

  // True if the slices of b are kept, for a number of columns of a thread.
  bool AreKept(int64_t columns) const { return kParts * rows * Pieces::OfAtMost(kColumns, columns).size <= Size::kKept; }
};

// Rows and columns of c that a thread computes; `across` threads divide the columns.
struct Grid {
  int64_t rows, columns, across;

  // The split that takes least time, of multiplying, and of reading both factors as often as they are needed. An
  // element takes as long to read as kReading products of two; to turn it, or to put it in pairs, takes as long again.
  template <int kParts>
  Grid(int64_t m, int64_t n, const Slices<kParts>& slices, int64_t threads) {
    constexpr double kReading = 64 * kParts / std::size(tiles::Terms<kParts>::kAll);
    const bool turns_a = slices.all.front().pair->a.is_turned;
    double least = 0;
    for (int64_t wide = 1; wide <= threads; ++wide) {
      if (threads % wide) continue;
      const int64_t some_rows = Pieces(m, threads / wide).size, some_columns = Pieces(n, wide).size;
      const int64_t of_a = Pieces::OfAtMost(kColumns, some_columns).count * (turns_a ? 2 : 1);
      const int64_t of_b = 2 * (slices.AreKept(some_columns) ? 1 : Pieces::OfAtMost(kMany, some_rows).count);
      const double time = double(some_rows) * some_columns + kReading * (some_rows * of_a + some_columns * of_b);
      if (wide == 1 || time < least) least = time, rows = some_rows, columns = some_columns, across = wide;
    }
  }
};

// kStep rows of a from (row, depth) on: where they are, or copied
inline tiles::Left LeftOf(const Matrix& a, int64_t row, int64_t rows, int64_t depth, int64_t count, uint16_t* room) {
  constexpr int64_t kPeriod = 2048;  // elements: rows that far apart push each other out of the first-level cache
  const auto* from = a.At<uint16_t>(row, depth);
  if (!a.is_turned && rows == tiles::kStep && count % tiles::kStep == 0 && a.lead % kPeriod) return {from, a.lead, 0};
  const int64_t lead = tiles::Lead(tiles::Whole(count), 2);
  if (a.is_turned)
    tiles::Turn(from, a.lead, count, rows, room, lead);
  else
    for (int64_t r = 0; r < rows; ++r) std::copy_n(from + r * a.lead, count, room + r * lead);
  tiles::FillUp(room, lead, rows, count, tiles::kStep, tiles::Whole(count));
  return {room, lead, 0};
}

// The same in parts.
inline tiles::Left LeftPartsOf(const Matrix& a, int64_t row, int64_t rows, int64_t depth, int64_t count,
                               uint16_t* room) {
  const int64_t lead = tiles::Lead(tiles::Whole(count), 2), part = tiles::kStep * lead;
  const float* from = a.At<float>(row, depth);
  if (a.is_turned) {
    tiles::SplitTurned(from, a.lead, count, rows, room, lead, part);
    return {room, lead, part};
  }
  for (int64_t r = 0; r < rows; ++r) tiles::Split(from + r * a.lead, count, room + r * lead, part);
  for (int p = 0; p < 3; ++p)
    tiles::FillUp(room + p * part, lead, rows, count, tiles::kStep, tiles::Whole(count));
  return {room, lead, part};
}

// `count` rows and `columns` columns of b from (depth, column) on, in pairs of rows, kStep columns after the other
inline void Right(const Matrix& b, int64_t depth, int64_t count, int64_t column, int64_t columns, uint16_t* room,
                  uint32_t* to) {
  const int64_t deep = tiles::Whole(count), lead = tiles::Lead(deep, 2);
  for (int64_t from = 0; from < columns; from += tiles::kStep, to += deep / 2 * tiles::kStep) {
    const int64_t some = std::min(columns - from, tiles::kStep);
    const auto take = [&](const auto* x) {
      if (!b.is_turned) return tiles::Pairs(x, b.lead, count, some, to, tiles::kStep, deep, tiles::kStep);
      // rows of the transpose have the pairs as neighbours: a pair is transposed as one number
      tiles::Rows(x, b.lead, some, count, room, lead, tiles::kStep, deep);
      tiles::Turn(reinterpret_cast<const uint32_t*>(room), lead / 2, tiles::kStep, deep / 2, to, tiles::kStep);
    };
    if (b.is_float)
      take(b.At<float>(depth, column + from));
    else
      take(b.At<uint16_t>(depth, column + from));
  }
}

// The same in parts, those of kStep columns after the other.
inline void RightParts(const Matrix& b, int64_t depth, int64_t count, int64_t column, int64_t columns, uint32_t* to) {
  const int64_t deep = tiles::Whole(count), part = deep / 2 * tiles::kStep;
  const auto split = b.is_turned ? tiles::TurnedPairsOfParts : tiles::PairsOfParts;
  split(b.At<float>(depth, column), b.lead, count, columns, to, part, deep);
}

// Sums [rows, columns] to c, whose rows are `lead` elements apart; past the caches, or not
template <typename T>
void Leave(const float* sums, int64_t sums_lead, int64_t rows, int64_t columns, T* c, int64_t lead, bool past) {
  for (int64_t r = 0; r < rows; ++r, sums += sums_lead, c += lead)
    if (past)
      tiles::Stream(sums, columns, c);
    else
      tiles::Round(sums, columns, c);
}

// Makes rows [top, bottom) and columns [left, right) of c, in one thread.
template <int kParts>
class Worker {
 public:
  Worker(const Slices<kParts>& slices, int64_t top, int64_t bottom, int64_t left, int64_t right)
      : slices_(slices), top_(top), bottom_(bottom), left_(left), right_(right), keeps_(slices.AreKept(right - left)),
        wide_(Pieces::OfAtMost(kColumns, right - left)),
        tall_(Pieces::OfAtMost(keeps_ ? kRows : kMany, bottom - top)), sums_lead_(tiles::Lead(wide_.size, 4)) {
    constexpr int64_t kDepth = Sizes<kParts>::kDepth;
    thread_local Room for_rows, for_pairs, for_sums;
    rows_ = for_rows.For<uint16_t>(kParts * tiles::kStep * tiles::Lead(kDepth, 2));
    pairs_ = for_pairs.For<uint32_t>(kParts * (keeps_ ? slices.rows : kDepth) / 2 * wide_.size);
    sums_ = for_sums.For<float>(tall_.size * sums_lead_);
  }

  void operator()(const Result& c, int64_t lead, bool past) const {
    for (int64_t n = left_; n < right_; n += wide_.size) {
      const int64_t columns = std::min(wide_.size, right_ - n);
      for (int64_t m = top_; m < bottom_; m += tall_.size) {
        const int64_t rows = std::min(tall_.size, bottom_ - m);
        for (size_t slice = 0; slice < slices_.all.size(); ++slice) Add(slice, m, rows, n, columns);
        if (c.is_float)
          Leave(sums_, sums_lead_, rows, columns, static_cast<float*>(c.data) + m * lead + n, lead, past);
        else
          Leave(sums_, sums_lead_, rows, columns, static_cast<uint16_t*>(c.data) + m * lead + n, lead, past);
      }
    }
    if (past) _mm_sfence();
  }

 private:
  // Adds the products of one slice to the sums of a block; those of the first begin them.
  void Add(size_t number, int64_t m, int64_t rows, int64_t n, int64_t columns) const {
    const Slice& slice = slices_.all[number];
    const int64_t whole = tiles::Whole(slice.count), strips = tiles::Whole(columns) / tiles::kStep;
    uint32_t* of_b = pairs_ + (keeps_ ? kParts * slice.at / 2 * wide_.size : 0);
    if (!keeps_ || m == top_) TakeRight(slice, n, columns, of_b);
    for (int64_t i = 0; i < rows; i += tiles::kStep) {
      const int64_t some_rows = std::min(tiles::kStep, rows - i);
      const tiles::Left of_a = TakeLeft(slice, m + i, some_rows);
      // what comes next: the rows below, after the last of a block the next slice, after the last slice the next block
      const bool is_end = i + tiles::kStep >= rows, is_last = is_end && number + 1 == slices_.all.size();
      const Slice& then = slices_.all[is_last ? 0 : number + is_end];
      const int64_t row = is_last ? m + rows : is_end ? m : m + i + tiles::kStep;
      tiles::Ahead ahead = row + tiles::kStep <= bottom_ ? Rows(then, row) : tiles::Ahead();
      for (int64_t s = 0; s < strips; ++s) {
        const int64_t part = tiles::kStep * whole / 2;
        const auto* strip = reinterpret_cast<const uint16_t*>(of_b + s * kParts * part);
        const tiles::Size size = {some_rows, std::min(tiles::kStep, columns - s * tiles::kStep), slice.count};
        multiply_.template Block<kParts>(size, of_a, {strip, tiles::kStep, 2 * part},
                                         sums_ + i * sums_lead_ + s * tiles::kStep, sums_lead_, number > 0, ahead);
      }
    }
  }

  // kStep rows of a, or of its transpose, in memory.
  static tiles::Ahead Rows(const Slice& slice, int64_t row) {
    const Matrix& a = slice.pair->a;
    const int64_t size = a.is_float ? 4 : 2, first = a.is_turned ? slice.from * a.lead + row : row * a.lead + slice.from;
    const int64_t count = a.is_turned ? slice.count : tiles::kStep, wide = a.is_turned ? tiles::kStep : slice.count;
    return {static_cast<const char*>(a.data) + first * size, a.lead * size, count, wide * size};
  }

  tiles::Left TakeLeft(const Slice& slice, int64_t row, int64_t rows) const {
    if constexpr (kParts > 1)
      return LeftPartsOf(slice.pair->a, row, rows, slice.from, slice.count, rows_);
    else
      return LeftOf(slice.pair->a, row, rows, slice.from, slice.count, rows_);
  }

  void TakeRight(const Slice& slice, int64_t column, int64_t columns, uint32_t* to) const {
    if constexpr (kParts > 1)
      RightParts(slice.pair->b, slice.from, slice.count, column, columns, to);
    else
      Right(slice.pair->b, slice.from, slice.count, column, columns, rows_, to);
  }

  const Slices<kParts>& slices_;
  const int64_t top_, bottom_, left_, right_;
  const bool keeps_;
  const Pieces wide_, tall_;
  const int64_t sums_lead_;
  uint16_t* rows_;
  uint32_t* pairs_;
  float* sums_;
  const tiles::Multiplier multiply_{};
};

// m, n and each k are at least 1; all pairs have the same sides transposed.
template <int kParts>
void Multiply(int64_t m, int64_t n, const std::vector<Pair>& pairs, const Result& c) {
  const int64_t threads = omp_get_max_threads();
  const Slices<kParts> slices(pairs);
  const Grid grid(m, n, slices, threads);
  const bool past = m * n * (c.is_float ? 4 : 2) >= kPast;
#pragma omp parallel for num_threads(threads) schedule(static, 1)  // the runtime may give fewer threads
  for (int64_t part = 0; part < threads; ++part) {
    const int64_t top = part / grid.across * grid.rows, left = part % grid.across * grid.columns;
    const int64_t bottom = std::min(m, top + grid.rows), right = std::min(n, left + grid.columns);
    if (top < bottom && left < right) Worker<kParts>(slices, top, bottom, left, right)(c, n, past);
  }
}

}  // namespace blocks
