// Splits float32 matrices into three parts of bfloat16 each, in the forms that tiles.h takes: rows, or pairs of rows.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "tiles.h"

namespace tiles {

// The next part of a float32 number, as one, of which less remains then. Ties are rounded up, not to even: of an exact
// sum of three parts that is as good. What is left of NaN is NaN.
inline float TakePart(float& rest) {
  uint32_t bits;
  std::memcpy(&bits, &rest, 4);
  bits = (bits + 0x8000) & 0xFFFF0000;
  float part;
  std::memcpy(&part, &bits, 4);
  rest -= part;
  return part;
}

inline uint16_t Upper(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits >> 16;
}

#if defined(__AVX512BW__)
inline __m512 TakePart(__m512& rest) {
  const __m512i up = _mm512_add_epi32(_mm512_castps_si512(rest), _mm512_set1_epi32(0x8000));
  const __m512 part = _mm512_castsi512_ps(_mm512_and_si512(up, _mm512_set1_epi32(0xFFFF0000)));
  rest = _mm512_sub_ps(rest, part);
  return part;
}

// The upper halves of 32 numbers.
inline __m512i Upper(__m512 first, __m512 second) {
  alignas(64) static constexpr auto kOrder = [] {
    struct { uint16_t at[32] = {}; } order;
    for (int i = 0; i < 32; ++i) order.at[i] = 2 * i + 1;
    return order;
  }();
  return _mm512_permutex2var_epi16(_mm512_castps_si512(first), _mm512_load_si512(kOrder.at),
                                   _mm512_castps_si512(second));
}

// Pairs of the upper halves of 16 numbers, even[i] and odd[i].
inline __m512i UpperPairs(__m512 even, __m512 odd) {
  return _mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32(_mm512_castps_si512(even), 16),
                                 _mm512_castps_si512(odd));
}

// 32 numbers in three parts.
inline void Split(__m512 first, __m512 second, uint16_t* to, int64_t part) {
  for (int p = 0; p < 2; ++p) {
    const __m512 of_first = TakePart(first), of_second = TakePart(second);
    _mm512_storeu_si512(to + p * part, Upper(of_first, of_second));
  }
  _mm512_storeu_si512(to + 2 * part, Upper(first, second));
}
#endif

// x in three parts, `part` elements apart: as bfloat16 each, and together x.
inline void Split(const float* x, int64_t count, uint16_t* to, int64_t part) {
  int64_t i = 0;
#if defined(__AVX512BW__)
  for (; i + 32 <= count; i += 32) Split(_mm512_loadu_ps(x + i), _mm512_loadu_ps(x + i + 16), to + i, part);
#endif
  for (; i < count; ++i) {
    float rest = x[i];
    for (int p = 0; p < 2; ++p) to[p * part + i] = Upper(TakePart(rest));
    to[2 * part + i] = Upper(rest);
  }
}

// The same in pairs of even[i] and odd[i].
inline void SplitPairs(const float* even, const float* odd, int64_t count, uint32_t* to, int64_t part) {
  int64_t i = 0;
#if defined(__AVX512BW__)
  for (; i + 16 <= count; i += 16) {
    __m512 first = _mm512_loadu_ps(even + i), second = _mm512_loadu_ps(odd + i);
    for (int p = 0; p < 2; ++p) {
      const __m512 of_first = TakePart(first), of_second = TakePart(second);
      _mm512_storeu_si512(to + p * part + i, UpperPairs(of_first, of_second));
    }
    _mm512_storeu_si512(to + 2 * part + i, UpperPairs(first, second));
  }
#endif
  for (; i < count; ++i) {
    float first = even[i], second = odd[i];
    for (int p = 0; p < 2; ++p) {
      const uint16_t of_first = Upper(TakePart(first));
      to[p * part + i] = of_first | uint32_t(Upper(TakePart(second))) << 16;
    }
    to[2 * part + i] = Upper(first) | uint32_t(Upper(second)) << 16;
  }
}

// Pairs of rows of x [rows, columns], kStep columns after the other, of each three parts that are `part` pairs apart;
// padded with zeros up to rows_whole and a multiple of kStep.
inline void PairsOfParts(const float* x, int64_t step, int64_t rows, int64_t columns, uint32_t* to, int64_t part,
                         int64_t rows_whole) {
  alignas(64) static constexpr float kNothing[kStep] = {};
  for (int64_t r = 0; r < rows_whole; r += 2, to += kStep)  // x is read in the order in which it is in memory
    for (int64_t from = 0; from < columns; from += kStep) {
      const int64_t some = std::min(columns - from, kStep);
      const float* even = r < rows ? x + r * step + from : kNothing;
      uint32_t* pairs = to + from / kStep * 3 * part;
      SplitPairs(even, r + 1 < rows ? even + step : kNothing, some, pairs, part);
      for (int p = 0; p < 3; ++p) std::fill(pairs + p * part + some, pairs + p * part + kStep, 0);
    }
}

// Four columns of kRows rows of x [rows, columns]: where they are, or copied, with zeros for what is not there.
template <int kRows>
class FourColumns {
 public:
  const float* x;
  int64_t step;

  FourColumns(const float* from, int64_t from_step, int64_t rows, int64_t columns) : x(from), step(from_step) {
    if (rows >= kRows && columns >= 4) return;
    std::fill_n(copy_, kRows * 4, 0.f);
    for (int64_t r = 0; r < std::min<int64_t>(rows, kRows); ++r)
      for (int64_t c = 0; c < std::min<int64_t>(columns, 4); ++c) copy_[r * 4 + c] = from[r * from_step + c];
    x = copy_, step = 4;
  }
  FourColumns(const FourColumns&) = delete;
  FourColumns& operator=(const FourColumns&) = delete;

 private:
  float copy_[kRows * 4];
};

#if defined(__AVX512BW__)
// Four numbers of each of four rows, side by side: loads put them there, as one unit alone moves numbers in registers.
inline __m512 FourRows(const float* x, int64_t step) {
  const __m512 rows = _mm512_castps128_ps512(_mm_loadu_ps(x));
  const __m512 two = _mm512_mask_broadcast_f32x4(rows, 0x00F0, _mm_loadu_ps(x + step));
  const __m512 three = _mm512_mask_broadcast_f32x4(two, 0x0F00, _mm_loadu_ps(x + 2 * step));
  return _mm512_mask_broadcast_f32x4(three, 0xF000, _mm_loadu_ps(x + 3 * step));
}

// Of every four numbers of x and of y: their first two, or their last two.
inline __m512 FirstTwo(__m512 x, __m512 y) { return _mm512_shuffle_ps(x, y, 0x44); }
inline __m512 LastTwo(__m512 x, __m512 y) { return _mm512_shuffle_ps(x, y, 0xEE); }

// y [4, 16] of x [16, 4]
inline void TurnFour(const float* x, int64_t step, __m512 (&y)[4]) {
  __m512 rows[4];  // i, 4 + i, 8 + i and 12 + i
  for (int i = 0; i < 4; ++i) rows[i] = FourRows(x + i * step, 4 * step);
  const __m512 low = _mm512_unpacklo_ps(rows[0], rows[1]), high = _mm512_unpackhi_ps(rows[0], rows[1]);
  const __m512 then_low = _mm512_unpacklo_ps(rows[2], rows[3]), then_high = _mm512_unpackhi_ps(rows[2], rows[3]);
  y[0] = FirstTwo(low, then_low), y[1] = LastTwo(low, then_low);
  y[2] = FirstTwo(high, then_high), y[3] = LastTwo(high, then_high);
}
#endif

// Its transpose in three parts, in rows `lead` apart.
inline void SplitFour(const FourColumns<32>& four, uint16_t* to, int64_t lead, int64_t part) {
#if defined(__AVX512BW__)
  __m512 first[4], second[4];
  TurnFour(four.x, four.step, first), TurnFour(four.x + 16 * four.step, four.step, second);
  for (int i = 0; i < 4; ++i) Split(first[i], second[i], to + i * lead, part);
#else
  for (int r = 0; r < 32; ++r)
    for (int i = 0; i < 4; ++i) Split(four.x + r * four.step + i, 1, to + i * lead + r, part);
#endif
}

// The same in pairs of rows.
inline void SplitFourPairs(const FourColumns<16>& four, uint32_t* to, int64_t lead, int64_t part) {
  auto* halves = reinterpret_cast<uint16_t*>(to);
  const float* x = four.x;
  const int64_t step = four.step;
#if defined(__AVX512BW__)
  const __m512 even = FourRows(x, 2 * step), odd = FourRows(x + step, 2 * step);
  const __m512 then_even = FourRows(x + 8 * step, 2 * step), then_odd = FourRows(x + 9 * step, 2 * step);
  Split(FirstTwo(even, odd), FirstTwo(then_even, then_odd), halves, 2 * part);
  Split(LastTwo(even, odd), LastTwo(then_even, then_odd), halves + 2 * lead, 2 * part);
#else
  for (int r = 0; r < 16; ++r)
    for (int i = 0; i < 4; ++i) Split(x + r * step + i, 1, halves + i / 2 * 2 * lead + 2 * r + i % 2, 2 * part);
#endif
}

// The transpose of x [rows, columns], columns <= kStep, in three parts, in rows `lead` apart, padded with zeros up
// to multiples of kStep. No intermediate numbers are stored: stores would take as long as the rest.
inline void SplitTurned(const float* x, int64_t step, int64_t rows, int64_t columns, uint16_t* to, int64_t lead,
                        int64_t part) {
  for (int64_t r = 0; r < rows; r += kStep)
    for (int64_t c = 0; c < kStep; c += 4)
      SplitFour({x + r * step + c, step, rows - r, columns - c}, to + c * lead + r, lead, part);
}

// As PairsOfParts, of the transpose of x [columns, rows].
inline void TurnedPairsOfParts(const float* x, int64_t step, int64_t rows, int64_t columns, uint32_t* to, int64_t part,
                               int64_t rows_whole) {
  for (int64_t c = 0; c < Whole(columns); c += 16) {
    uint32_t* pairs = to + c / kStep * 3 * part + c % kStep;
    for (int64_t r = 0; r < rows_whole; r += 4)
      SplitFourPairs({x + c * step + r, step, columns - c, rows - r}, pairs + r / 2 * kStep, kStep, part);
  }
}

}  // namespace tiles
