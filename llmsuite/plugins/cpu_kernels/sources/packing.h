// Puts matrices into the forms that tiles.h takes: rounded, in rows or in pairs of rows, transposed, padded with zeros.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cstdint>

#include "tiles.h"

namespace tiles {

// to[i] = x[i], rounded.
inline void Round(const float* x, int64_t count, uint16_t* to) {
  int64_t i = 0;
#if defined(__AVX512BF16__)
  for (; i + 16 <= count; i += 16)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x + i)));
#endif
  for (; i < count; ++i) to[i] = rounding::Half(x[i]);
}

// to[i] = even[i] and odd[i], rounded
inline void RoundPairs(const float* even, const float* odd, int64_t count, uint32_t* to) {
  int64_t i = 0;
#if defined(__AVX512BF16__)
  for (; i + 16 <= count; i += 16) {
    const __m512i first = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(even + i)));
    const __m512i second = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(odd + i)));
    _mm512_storeu_si512(to + i, _mm512_or_si512(first, _mm512_slli_epi32(second, 16)));
  }
#endif
  for (; i < count; ++i) to[i] = rounding::Half(even[i]) | uint32_t(rounding::Half(odd[i])) << 16;
}

// The same of what has that type already.
template <typename T>
void Round(const T* x, int64_t count, T* to) {
  std::copy_n(x, count, to);
}

// to[i] = even[i] and odd[i]
inline void RoundPairs(const uint16_t* even, const uint16_t* odd, int64_t count, uint32_t* to) {
  int64_t i = 0;
#if defined(__AVX512BW__)
  alignas(64) static constexpr auto kOrder = [] {
    struct { uint16_t first[32] = {}, second[32] = {}; } order;
    for (int j = 0; j < 32; ++j)
      order.first[j] = j / 2 + j % 2 * 32, order.second[j] = 16 + j / 2 + j % 2 * 32;
    return order;
  }();
  const __m512i first = _mm512_load_si512(kOrder.first), second = _mm512_load_si512(kOrder.second);
  for (; i + 32 <= count; i += 32) {
    const __m512i left = _mm512_loadu_si512(even + i), right = _mm512_loadu_si512(odd + i);
    _mm512_storeu_si512(to + i, _mm512_permutex2var_epi16(left, first, right));
    _mm512_storeu_si512(to + i + 16, _mm512_permutex2var_epi16(left, second, right));
  }
#endif
  for (; i < count; ++i) to[i] = even[i] | uint32_t(odd[i]) << 16;
}

inline uint16_t Rounded(float x) { return rounding::Half(x); }
inline uint16_t Rounded(uint16_t x) { return x; }

// to[i] = x[i], rounded to what `to` has: past the caches, where it lies at the beginning of a line.
inline void Stream(const float* x, int64_t count, float* to) {
  int64_t i = 0;
#if defined(__AVX512F__)
  if (reinterpret_cast<uintptr_t>(to) % kLine == 0)
    for (; i + 16 <= count; i += 16) _mm512_stream_ps(to + i, _mm512_loadu_ps(x + i));
#endif
  std::copy_n(x + i, count - i, to + i);
}

inline void Stream(const float* x, int64_t count, uint16_t* to) {
  int64_t i = 0;
#if defined(__AVX512BF16__)
  if (reinterpret_cast<uintptr_t>(to) % kLine == 0)
    for (; i + 32 <= count; i += 32)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i),
                          (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + i + 16), _mm512_loadu_ps(x + i)));
#endif
  Round(x + i, count - i, to + i);
}

// x [rows, size], rounded, in rows `lead` apart, padded with zeros up to [rows_whole, size_whole]
template <typename T>
void Rows(const T* x, int64_t step, int64_t rows, int64_t size, uint16_t* to, int64_t lead, int64_t rows_whole,
          int64_t size_whole) {
  for (int64_t r = 0; r < rows_whole; ++r) {
    const int64_t count = r < rows ? size : 0;
    Round(x + r * step, count, to + r * lead);
    std::fill(to + r * lead + count, to + r * lead + size_whole, 0);
  }
}

// The same in pairs of rows.
template <typename T>
void Pairs(const T* x, int64_t step, int64_t rows, int64_t size, uint32_t* to, int64_t lead, int64_t rows_whole,
           int64_t size_whole) {
  for (int64_t r = 0; r < rows_whole; r += 2) {
    uint32_t* row = to + r / 2 * lead;
    const T* even = x + r * step;
    const int64_t count = r < rows ? size : 0;
    if (r + 1 < rows)
      RoundPairs(even, even + step, count, row);
    else
      for (int64_t i = 0; i < count; ++i) row[i] = Rounded(even[i]);
    std::fill(row + count, row + size_whole, 0);
  }
}

// Pads [rows, size] with zeros up to [rows_whole, size_whole].
inline void FillUp(uint16_t* x, int64_t lead, int64_t rows, int64_t size, int64_t rows_whole, int64_t size_whole) {
  for (int64_t r = 0; r < rows_whole; ++r)
    std::fill(x + r * lead + (r < rows ? size : 0), x + r * lead + size_whole, 0);
}

// Turns a block of kSide x kSide numbers, kSide = 16 bytes / their size, in registers.
inline void TurnBlock(const uint16_t* x, int64_t x_step, uint16_t* y, int64_t y_step) {
  __m128i a[8], b[8];
  for (int i = 0; i < 8; ++i) a[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i * x_step));
  for (int i = 0; i < 4; ++i)  // rows 2 i and 2 i + 1, then four of them, then all
    b[2 * i] = _mm_unpacklo_epi16(a[2 * i], a[2 * i + 1]), b[2 * i + 1] = _mm_unpackhi_epi16(a[2 * i], a[2 * i + 1]);
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; ++j) {
      a[i + 2 * j] = _mm_unpacklo_epi32(b[i + j], b[i + j + 2]);
      a[i + 2 * j + 1] = _mm_unpackhi_epi32(b[i + j], b[i + j + 2]);
    }
  for (int i = 0; i < 4; ++i) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(y + 2 * i * y_step), _mm_unpacklo_epi64(a[i], a[i + 4]));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(y + (2 * i + 1) * y_step), _mm_unpackhi_epi64(a[i], a[i + 4]));
  }
}

inline void TurnBlock(const float* x, int64_t x_step, float* y, int64_t y_step) {
  __m128 a[4];
  for (int i = 0; i < 4; ++i) a[i] = _mm_loadu_ps(x + i * x_step);
  _MM_TRANSPOSE4_PS(a[0], a[1], a[2], a[3]);
  for (int i = 0; i < 4; ++i) _mm_storeu_ps(y + i * y_step, a[i]);
}

inline void TurnBlock(const uint32_t* x, int64_t x_step, uint32_t* y, int64_t y_step) {  // moves bits only
  TurnBlock(reinterpret_cast<const float*>(x), x_step, reinterpret_cast<float*>(y), y_step);
}

// y [columns, rows] of x [rows, columns]
template <typename T>
void TurnSome(const T* x, int64_t x_step, int64_t rows, int64_t columns, T* y, int64_t y_step) {
  constexpr int64_t kSide = 16 / sizeof(T);
  for (int64_t c = 0; c < columns; c += kSide)  // a cache line of y is written together
    for (int64_t r = 0; r < rows; r += kSide)
      if (r + kSide <= rows && c + kSide <= columns)
        TurnBlock(x + r * x_step + c, x_step, y + c * y_step + r, y_step);
      else
        for (int64_t j = c; j < std::min(c + kSide, columns); ++j)
          for (int64_t i = r; i < std::min(r + kSide, rows); ++i) y[j * y_step + i] = x[i * x_step + j];
}

#if defined(__AVX512BW__)
// Turns 16 x 16 numbers of 32 bits.
inline void TurnWords(__m512i (&x)[16]) {
  __m512i y[16];
  for (int i = 0; i < 16; i += 2)  // within parts of four numbers: pairs of rows, then four of them
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]), y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + j + 2]);
      x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + j + 2]);
    }
  constexpr int kEven = 0x88, kOdd = 0xdd;  // parts of both arguments
  for (int i = 0; i < 4; ++i) {             // part p of x[4 g + i] has column 4 p + i of rows 4 g to 4 g + 3
    const __m512i low = _mm512_shuffle_i32x4(x[i], x[4 + i], kEven);
    const __m512i high = _mm512_shuffle_i32x4(x[8 + i], x[12 + i], kEven);
    y[i] = _mm512_shuffle_i32x4(low, high, kEven), y[8 + i] = _mm512_shuffle_i32x4(low, high, kOdd);
    const __m512i left = _mm512_shuffle_i32x4(x[i], x[4 + i], kOdd);
    const __m512i right = _mm512_shuffle_i32x4(x[8 + i], x[12 + i], kOdd);
    y[4 + i] = _mm512_shuffle_i32x4(left, right, kEven), y[12 + i] = _mm512_shuffle_i32x4(left, right, kOdd);
  }
  std::copy_n(y, 16, x);
}

inline void TurnLines(const uint32_t* x, int64_t x_step, uint32_t* y, int64_t y_step) {  // 16 x 16
  __m512i rows[16];
  for (int i = 0; i < 16; ++i) rows[i] = _mm512_loadu_si512(x + i * x_step);
  TurnWords(rows);
  for (int i = 0; i < 16; ++i) _mm512_storeu_si512(y + i * y_step, rows[i]);
}

inline void TurnLines(const float* x, int64_t x_step, float* y, int64_t y_step) {
  TurnLines(reinterpret_cast<const uint32_t*>(x), x_step, reinterpret_cast<uint32_t*>(y), y_step);
}

inline void TurnLines(const uint16_t* x, int64_t x_step, uint16_t* y, int64_t y_step) {  // 32 x 32
  __m512i left[16], right[16];  // two rows as one of pairs
  for (int i = 0; i < 16; ++i) {
    uint32_t pairs[32];
    RoundPairs(x + 2 * i * x_step, x + (2 * i + 1) * x_step, 32, pairs);
    left[i] = _mm512_loadu_si512(pairs), right[i] = _mm512_loadu_si512(pairs + 16);
  }
  TurnWords(left), TurnWords(right);
  for (int i = 0; i < 16; ++i) {
    _mm512_storeu_si512(y + i * y_step, left[i]);
    _mm512_storeu_si512(y + (16 + i) * y_step, right[i]);
  }
}
#endif

template <typename T>
void Turn(const T* x, int64_t x_step, int64_t rows, int64_t columns, T* y, int64_t y_step) {
  int64_t whole_rows = 0, whole_columns = 0;
#if defined(__AVX512BW__)
  constexpr int64_t kSide = kLine / sizeof(T);
  whole_rows = rows / kSide * kSide, whole_columns = columns / kSide * kSide;
  for (int64_t c = 0; c < whole_columns; c += kSide)
    for (int64_t r = 0; r < whole_rows; r += kSide) TurnLines(x + r * x_step + c, x_step, y + c * y_step + r, y_step);
#endif
  TurnSome(x + whole_columns, x_step, whole_rows, columns - whole_columns, y + whole_columns * y_step, y_step);
  TurnSome(x + whole_rows * x_step, x_step, rows - whole_rows, columns, y + whole_rows, y_step);
}

}  // namespace tiles
