// Products of bfloat16 matrices with float32 sums, for blocks that stay in a core's cache:
//   c [m, n] = a [m, k] b [k, n], or added to c. m, n and k are multiples of kStep.
// A float32 matrix is the sum of three of bfloat16, its parts, each of which is what is left of it, rounded. The product
// of two such is then that of all of their parts, less those that are beyond float32: see Terms.
// a is in rows; b in pairs of rows, as the processors' instructions take it: b[i, j] is at (i / 2 * ldb + j) * 2 + i % 2.
// By AMX where the system lets a process use it, by AVX-512 where it has products of bfloat16, else by plain loops.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <utility>

#include "rounding.h"

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tiles {

constexpr int64_t kStep = 32;
constexpr int64_t kLine = 64;  // bytes

// A number of rows or columns, filled up to a multiple of kStep.
inline int64_t Whole(int64_t count) { return (count + kStep - 1) / kStep * kStep; }

// Elements of `bytes` bytes from one row to the next of at least `count`: an odd number of cache lines, because rows that
// are a power of two apart would push each other out of the cache.
inline int64_t Lead(int64_t count, int64_t bytes) { return ((count * bytes + kLine - 1) / kLine | 1) * kLine / bytes; }

// Which parts of a and b are multiplied. Each part is at most 2^-8 of the one before it, so that those which are left out
// of nine are 2^-24 and less: as in Henry, Tang and Heinecke 2019, arXiv 1904.06376, for BFLOAT16x3 with 6 products.
template <int kParts>
struct Terms;
template <>
struct Terms<1> {
  static constexpr int kAll[][2] = {{0, 0}};
};
template <>
struct Terms<3> {
  static constexpr int kAll[][2] = {{2, 0}, {1, 0}, {1, 1}, {0, 1}, {0, 2}, {0, 0}};  // one factor stays for the next
};

// Memory at the beginning of a cache line.
template <typename T>
class Scratch {
 public:
  explicit Scratch(int64_t count) : memory_(static_cast<T*>(std::aligned_alloc(kLine, Bytes(count))), std::free) {
    PD_CHECK(memory_, "there is no memory for ", Bytes(count), " bytes");  // of bad_alloc Paddle makes no exception
  }
  T* data() const { return memory_.get(); }

 private:
  static size_t Bytes(int64_t count) { return (count * sizeof(T) + kLine - 1) / kLine * kLine; }
  std::unique_ptr<T, decltype(&std::free)> memory_;
};

// A factor: rows, or pairs of rows, `lead` apart; its parts are `part` elements apart.
struct Left {
  const uint16_t* data;
  int64_t lead, part;
};
struct Right {
  const uint16_t* data;
  int64_t lead, part;  // `lead` in pairs
};

// The size of a block of c, at most kStep x kStep, and the number of products in each sum. a and b are padded with
// zeros up to multiples of kStep.
struct Size {
  int64_t rows, columns, depth;
};

// Memory that is needed soon, which comes to the second-level cache line by line between products: many requests
// together would delay those of the products.
class Ahead {
 public:
  Ahead() = default;
  // rows `step` bytes apart, of `size` bytes each
  Ahead(const void* rows, int64_t step, int64_t count, int64_t size)
      : line_(static_cast<const char*>(rows)), row_(line_), step_(step), size_(size), left_(count) {}

  void Next() {
    if (left_ == 0) return;
    __builtin_prefetch(line_, 0, 2);
    line_ += kLine;
    if (line_ < row_ + size_) return;
    row_ += step_, line_ = row_, --left_;
  }

 private:
  const char *line_ = nullptr, *row_ = nullptr;
  int64_t step_ = 0, size_ = 0, left_ = 0;
};

#if defined(__AVX512BF16__)
inline __m512bh Words(const uint16_t* p) { return (__m512bh)_mm512_loadu_si512(p); }

// kRows rows and kVectors times 16 columns of c, whose sums are registers: enough that no sum waits for its last addition
template <int kRows, int kVectors>
inline void Sums(int64_t k, const uint16_t* a, int64_t lda, const uint16_t* b, int64_t ldb, float* c, int64_t ldc,
                 bool adds) {
  __m512 sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < kVectors; ++j)
      sums[r][j] = adds ? _mm512_loadu_ps(c + r * ldc + 16 * j) : _mm512_setzero_ps();
  for (int64_t i = 0; i < k; i += 2, b += 2 * ldb) {
    __m512bh columns[kVectors];
    for (int j = 0; j < kVectors; ++j) columns[j] = Words(b + 32 * j);
    for (int r = 0; r < kRows; ++r) {
      int32_t pair;
      std::memcpy(&pair, a + r * lda + i, 4);
      const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
      for (int j = 0; j < kVectors; ++j) sums[r][j] = _mm512_dpbf16_ps(sums[r][j], both, columns[j]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < kVectors; ++j) _mm512_storeu_ps(c + r * ldc + 16 * j, sums[r][j]);
}
#else
template <int kRows, int kVectors>
inline void Sums(int64_t k, const uint16_t* a, int64_t lda, const uint16_t* b, int64_t ldb, float* c, int64_t ldc,
                 bool adds) {
  constexpr int kColumns = 16 * kVectors;
  for (int r = 0; r < kRows; ++r) {
    float sums[kColumns] = {};
    if (adds) std::memcpy(sums, c + r * ldc, sizeof sums);
    for (int64_t i = 0; i < k; i += 2) {
      const float first = rounding::Whole(a[r * lda + i]), second = rounding::Whole(a[r * lda + i + 1]);
      const uint16_t* pairs = b + i * ldb;
      for (int j = 0; j < kColumns; ++j)
        sums[j] += first * rounding::Whole(pairs[2 * j]) + second * rounding::Whole(pairs[2 * j + 1]);
    }
    std::memcpy(c + r * ldc, sums, sizeof sums);
  }
}
#endif

#if defined(__AMX_BF16__)
// Whether this process may use the registers of AMX; the first one that is asked asks Linux.
inline bool MayUseAmx() {
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM and XFEATURE_XTILEDATA of Linux
  static const bool may = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return may;
}

// Adds kStep x kStep products of one term to the registers; one of its factors may be there already.
template <int kParts, int kTerm>
inline void AddTerm(const Left& a, const Right& b, Ahead& ahead) {
  constexpr auto& kAll = Terms<kParts>::kAll;
  constexpr int kOfA = kAll[kTerm][0], kOfB = kAll[kTerm][1], kBefore = kTerm ? kTerm - 1 : 0;
  constexpr bool kNewA = kTerm == 0 || kAll[kBefore][0] != kOfA, kNewB = kTerm == 0 || kAll[kBefore][1] != kOfB;
  const uint16_t *rows = a.data + kOfA * a.part, *columns = b.data + kOfB * b.part;
  if constexpr (kNewA) {
    _tile_loadd(4, rows, 2 * a.lead);
    _tile_loadd(5, rows + 16 * a.lead, 2 * a.lead);
  }
  if constexpr (kNewB) _tile_loadd(6, columns, 4 * b.lead);
  _tile_dpbf16ps(0, 4, 6);
  ahead.Next();
  if constexpr (kParts == 1) ahead.Next();
  _tile_dpbf16ps(2, 5, 6);
  if constexpr (kNewB) _tile_loadd(7, columns + 32, 4 * b.lead);
  _tile_dpbf16ps(1, 4, 7);
  _tile_dpbf16ps(3, 5, 7);
}

template <int kParts, int... kTerm>
inline void AddTerms(const Left& a, const Right& b, Ahead& ahead, std::integer_sequence<int, kTerm...>) {
  (AddTerm<kParts, kTerm>(a, b, ahead), ...);
}

// kStep rows and columns of c: 2 x 2 registers of 16 x 16
template <int kParts>
void FourTiles(int64_t k, Left a, Right b, float* c, int64_t ldc, bool adds, Ahead& ahead) {
  const int64_t c_step = 4 * ldc;  // in bytes
  float* below = c + 16 * ldc;
  asm volatile("" ::: "memory");  // GCC 12 does not know that loading a tile reads memory
  if (adds) {
    _tile_loadd(0, c, c_step);
    _tile_loadd(1, c + 16, c_step);
    _tile_loadd(2, below, c_step);
    _tile_loadd(3, below + 16, c_step);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t i = 0; i < k; i += 32, a.data += 32, b.data += 32 * b.lead)
    AddTerms<kParts>(a, b, ahead, std::make_integer_sequence<int, std::size(Terms<kParts>::kAll)>());
  _tile_stored(0, c, c_step);
  _tile_stored(1, c + 16, c_step);
  _tile_stored(2, below, c_step);
  _tile_stored(3, below + 16, c_step);
}
#endif

// What multiplies in one thread; it holds the thread's registers of AMX while it is there.
class Multiplier {
 public:
#if defined(__AMX_BF16__)
  Multiplier() : has_amx_(MayUseAmx()) {
    if (!has_amx_) return;
    struct { uint8_t palette = 1, unused[15] = {}; uint16_t bytes[16] = {}; uint8_t rows[16] = {}; } form;
    std::fill(form.bytes, form.bytes + 8, 64), std::fill(form.rows, form.rows + 8, 16);
    asm volatile("" ::: "memory");  // GCC 12 takes only the first bytes of what is loaded for read
    _tile_loadconfig(&form);
  }
  ~Multiplier() {
    if (has_amx_) _tile_release();
  }
  Multiplier(const Multiplier&) = delete;
  Multiplier& operator=(const Multiplier&) = delete;
#endif

  void operator()(int64_t m, int64_t n, int64_t k, const uint16_t* a, int64_t lda, const uint16_t* b, int64_t ldb,
                  float* c, int64_t ldc, bool adds) const {
    Ahead nothing;
    for (int64_t i = 0; i < m; i += kStep)
      for (int64_t j = 0; j < n; j += kStep)
        Block<1>({kStep, kStep, k}, {a + i * lda, lda, 0}, {b + 2 * j, ldb, 0}, c + i * ldc + j, ldc, adds, nothing);
  }

  // c has room for kStep rows and columns; the values outside the block are meaningless.
  template <int kParts>
  void Block(const Size& size, const Left& a, const Right& b, float* c, int64_t ldc, bool adds, Ahead& ahead) const {
#if defined(__AMX_BF16__)
    if (has_amx_) return FourTiles<kParts>(Whole(size.depth), a, b, c, ldc, adds, ahead);
#endif
    const int64_t step = size.columns > 16 ? 8 : 16;
    for (const auto& [of_a, of_b] : Terms<kParts>::kAll) {
      const uint16_t *rows = a.data + of_a * a.part, *columns = b.data + of_b * b.part;
      for (int64_t r = 0; r < size.rows; r += step)
        if (size.columns > 16)
          Sums<8, 2>(size.depth, rows + r * a.lead, a.lead, columns, b.lead, c + r * ldc, ldc, adds);
        else
          Sums<16, 1>(size.depth, rows + r * a.lead, a.lead, columns, b.lead, c + r * ldc, ldc, adds);
      adds = true;
    }
  }

#if defined(__AMX_BF16__)
 private:
  const bool has_amx_;
#endif
};

}  // namespace tiles
