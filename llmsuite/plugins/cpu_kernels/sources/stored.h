// Packed weights: matrices in 16, 8 or 4 bits, widened in registers as a product reads them. The inputs of a product
// are rounded to bfloat16, in which codes and levels are exact; sums are float32, and so are scales. The layout is that
// of llmsuite/plugins/cpu_kernels/packing.py: tiles of kTile outputs, the last one padded; in a tile one block of
// inputs after the other. A block is the scale of each output (float32; none in 16 bits), then the codes, input by input. In 4 bits
// two inputs share the bytes of a row, the even one in the upper half.
//
// Shapes: I inputs and N outputs of a matrix.
#pragma once
#include <immintrin.h>

#include "products.h"
#include "rounding.h"

namespace {

constexpr int64_t kTile = 32;      // outputs of a tile
constexpr int64_t kMaxBlock = 64;  // inputs of a block
constexpr int kVectors = kTile / kWidth;

typedef int32_t Ints __attribute__((vector_size(kWidth * 4)));
typedef float Lanes __attribute__((vector_size(kWidth * 4)));

// kWidth numbers of 8 or 16 bits as numbers of 32. (GCC 12 makes one at a time of its own vector conversion.)
inline Ints Signed8(const uint8_t* p) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  Ints found;
  for (int i = 0; i < kWidth; ++i) found[i] = static_cast<int8_t>(p[i]);
  return found;
#endif
}

inline Ints Unsigned8(const uint8_t* p) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  Ints found;
  for (int i = 0; i < kWidth; ++i) found[i] = p[i];
  return found;
#endif
}

inline Ints Unsigned16(const uint8_t* p) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  Ints found;
  for (int i = 0; i < kWidth; ++i) found[i] = p[2 * i] | p[2 * i + 1] << 8;
  return found;
#endif
}

// How the codes of a matrix are read: `bits` of a code, and the value of each of 16 codes of 4 bits.
struct Form {
  int64_t bits;
  const float* levels;
  Form(int64_t bits, const std::vector<float>& levels) : bits(bits), levels(levels.data()) {
    PD_CHECK(bits != 4 || levels.size() == 16, "codes of 4 bits have 16 levels");
  }
};

// One way to read codes. A step is one row of bytes: `kInputs` inputs of kTile outputs.
struct Bf16 {
  static constexpr bool kScaled = false;
  static constexpr int kInputs = 1, kBytes = 2 * kTile;
  explicit Bf16(const float*) {}
  void Read(const uint8_t* row, int64_t n, Vector (&w)[kInputs]) const {
    w[0] = (Vector)(Unsigned16(row + 2 * n) << 16);
  }
};

struct Int8 {
  static constexpr bool kScaled = true;
  static constexpr int kInputs = 1, kBytes = kTile;
  explicit Int8(const float*) {}
  void Read(const uint8_t* row, int64_t n, Vector (&w)[kInputs]) const {
    w[0] = __builtin_convertvector(Signed8(row + n), Lanes);
  }
};

struct FourBits {
  static constexpr bool kScaled = true;
  static constexpr int kInputs = 2, kBytes = kTile;
  Lanes first, second;  // with vectors of 16 the first one has all levels
  explicit FourBits(const float* levels) : first(Load(levels)), second(Load(levels + 16 - kWidth)) {}
  Vector Level(Ints codes) const {
    return kWidth == 16 ? __builtin_shuffle(first, codes) : __builtin_shuffle(first, second, codes);
  }
  void Read(const uint8_t* row, int64_t n, Vector (&w)[kInputs]) const {
    const Ints codes = Unsigned8(row + n);
    w[0] = Level(codes >> 4), w[1] = Level(codes & 15);
  }
};

// Calls f with the way to read a matrix.
template <typename F>
void WithForm(const Form& form, F f) {
  switch (form.bits) {
    case 16: return f(Bf16(nullptr));
    case 8: return f(Int8(nullptr));
    case 4: return f(FourBits(form.levels));
    default: PD_THROW("a matrix is stored in 16, 8 or 4 bits, not in ", form.bits);
  }
}

// Inputs of a block: the largest power of two that divides I, up to kMaxBlock.
inline int64_t Block(int64_t I) {
  int64_t block = 1;
  while (block < kMaxBlock && I % (2 * block) == 0) block *= 2;
  return block;
}

// A matrix as it is stored.
struct Stored {
  const uint8_t* bytes;
  int64_t I, N;
  int64_t tiles() const { return (N + kTile - 1) / kTile; }
};

template <typename Way>
int64_t BlockBytes(int64_t block) {
  return (Way::kScaled ? kTile * 4 : 0) + block / Way::kInputs * Way::kBytes;
}

// Of a stack of `count` matrices the first one.
inline Stored ReadStored(const Tensor& tensor, const Form& form, int64_t I, int64_t N, const char* name,
                         int64_t count = 1) {
  const Stored found{nullptr, I, N};
  const int64_t block = Block(I);
  PD_CHECK(tensor.is_contiguous() && tensor.dtype() == paddle::DataType::UINT8, name, " has to be contiguous bytes");
  WithForm(form, [&](auto way) {
    using Way = decltype(way);
    const int64_t bytes = found.tiles() * (I / block) * BlockBytes<Way>(block);
    PD_CHECK(block % Way::kInputs == 0 && tensor.numel() == count * bytes, name, ": its bytes are not those of ", I,
             " inputs and ", N, " outputs");
  });
  return {tensor.data<uint8_t>(), I, N};
}

// y[r, n] += sum over a block of x[r, q] w[q, n] for the outputs [from, from + C kWidth) of a tile
template <typename Way, int R, int C>
inline void AddBlock(const Way& way, const uint8_t* bytes, int64_t block, const float* x, int64_t x_step, int64_t from,
                     float (*y)[kTile]) {
  const uint8_t* row = bytes + (Way::kScaled ? kTile * 4 : 0);
  Vector sums[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) sums[r][c] = Vector{};
#pragma GCC unroll 4
  for (int64_t q = 0; q < block; q += Way::kInputs, row += Way::kBytes) {
    __builtin_prefetch(row + 4096);
    for (int c = 0; c < C; ++c) {
      Vector w[Way::kInputs];
      way.Read(row, from + c * kWidth, w);
      for (int i = 0; i < Way::kInputs; ++i)
        for (int r = 0; r < R; ++r) sums[r][c] += w[i] * x[r * x_step + q + i];
    }
  }
  for (int c = 0; c < C; ++c) {
    const int64_t n = from + c * kWidth;
    for (int r = 0; r < R; ++r) {
      if constexpr (Way::kScaled) sums[r][c] *= Load(reinterpret_cast<const float*>(bytes) + n);
      Load(y[r] + n) += sums[r][c];
    }
  }
}

// Vectors of outputs that are summed together for R rows: as many as there are registers for.
constexpr int AtOnce(int R) {
  int count = kVectors;
  while (count > 1 && count * R > kWidth) count /= 2;
  return count;
}

// sums[r, n] = sum over q of x[r, q] w[q, n] for the outputs of a tile
template <int R, typename Way>
inline void SumTile(const Way& way, const uint8_t* bytes, int64_t I, const float* x, int64_t x_step,
                    float (&sums)[R][kTile]) {
  constexpr int C = AtOnce(R);
  const int64_t block = Block(I), size = BlockBytes<Way>(block);
  std::fill(sums[0], sums[0] + R * kTile, 0.f);
  for (int64_t q = 0; q < I; q += block, bytes += size)
    for (int c = 0; c < kVectors; c += C) AddBlock<Way, R, C>(way, bytes, block, x + q, x_step, c * kWidth, sums);
}

#ifdef __AVX512BF16__
inline __m512i Words(const void* p) { return _mm512_loadu_si512(p); }
// two inputs of 16 outputs each as the instruction takes them, from the lower or upper half of both
inline __m512i Pairs(__m512i even, __m512i odd, bool upper) {
  alignas(64) static constexpr auto kOrder = [] {
    struct { uint16_t of[2][32]; } order{};
    for (int i = 0; i < 64; ++i) order.of[i / 32][i % 32] = i / 2 + i % 2 * 32;
    return order;
  }();
  return _mm512_permutex2var_epi16(even, Words(kOrder.of[upper]), odd);
}
inline __m512bh TwoInputs(const uint16_t* x) {
  int32_t both;
  std::memcpy(&both, x, 4);
  return (__m512bh)_mm512_set1_epi32(both);
}

// The same by the processor's products of bfloat16, two inputs at a time; x is padded with a zero to an even number.
template <int R>
inline void SumTile(const Bf16&, const uint8_t* bytes, int64_t I, const uint16_t* x, int64_t x_step,
                    float (&sums)[R][kTile]) {
  __m512 lower[R], upper[R];
  for (int r = 0; r < R; ++r) lower[r] = upper[r] = _mm512_setzero_ps();
  for (int64_t q = 0; q < I; q += 2, bytes += 2 * Bf16::kBytes) {
    _mm_prefetch(bytes + 4096, _MM_HINT_T0), _mm_prefetch(bytes + 4096 + Bf16::kBytes, _MM_HINT_T0);
    const __m512i even = Words(bytes), odd = q + 1 < I ? Words(bytes + Bf16::kBytes) : _mm512_setzero_si512();
    const __m512bh first = (__m512bh)Pairs(even, odd, false), second = (__m512bh)Pairs(even, odd, true);
    for (int r = 0; r < R; ++r) {
      const __m512bh both = TwoInputs(x + r * x_step + q);
      lower[r] = _mm512_dpbf16_ps(lower[r], first, both);
      upper[r] = _mm512_dpbf16_ps(upper[r], second, both);
    }
  }
  for (int r = 0; r < R; ++r) _mm512_storeu_ps(sums[r], lower[r]), _mm512_storeu_ps(sums[r] + 16, upper[r]);
}
template <typename Way>
using InputOf = std::conditional_t<std::is_same_v<Way, Bf16>, uint16_t, float>;
#else
template <typename Way>
using InputOf = float;
#endif

inline void RoundTo(float x, float& to) { to = rounding::Whole(rounding::Half(x)); }
inline void RoundTo(float x, uint16_t& to) { to = rounding::Half(x); }

// x [B, I] rounded to bfloat16, in rows of an even number of elements.
template <typename Element>
class Rounded {
 public:
  Rounded(int64_t B, int64_t I) : step((I + 1) / 2 * 2), size_(I), room_(B * step) {}
  void Read(int64_t b, const float* x) {
    Element* row = room_.data() + b * step;
    for (int64_t i = 0; i < size_; ++i) RoundTo(x[i], row[i]);
  }
  const Element* row(int64_t b) const { return room_.data() + b * step; }
  const int64_t step;

 private:
  int64_t size_;
  std::vector<Element> room_;
};

// outputs [from, to) of y [B, N] = x [B, I] times a stored matrix; rows of x begin `x_step` apart
template <typename Way>
[[gnu::noinline]] void StoredProduct(const Way& way, const Stored& w, int64_t B, const float* x, int64_t x_step,
                                     int64_t from, int64_t to, float* y) {
  const int64_t block = Block(w.I), per_tile = w.I / block * BlockBytes<Way>(block);
  Rounded<InputOf<Way>> given(B, w.I);
  for (int64_t b = 0; b < B; ++b) given.Read(b, x + b * x_step);
  for (int64_t tile = from / kTile; tile * kTile < to; ++tile)
    for (int64_t b = 0; b < B; b += kRows)
      WithRows(B - b, [&](auto rows) {
        constexpr int R = rows();
        float sums[R][kTile];
        SumTile<R>(way, w.bytes + tile * per_tile, w.I, given.row(b), given.step, sums);
        const int64_t first = tile * kTile, begin = std::max(from, first), end = std::min(to, first + kTile);
        for (int r = 0; r < R; ++r)
          std::copy(sums[r] + begin - first, sums[r] + end - first, y + (b + r) * w.N + begin);
      });
}

// The float32 values of `count` tiles from `tile` on, inputs [from, end), full blocks: [end - from, count kTile].
template <typename Way>
void Widen(const Way& way, const Stored& w, int64_t tile, int64_t count, int64_t from, int64_t end, float* out) {
  const int64_t block = Block(w.I), size = BlockBytes<Way>(block), step = count * kTile;
  for (int64_t t = 0; t < count; ++t)
    for (int64_t q = from; q < end; q += block) {
      const uint8_t* bytes = w.bytes + ((tile + t) * (w.I / block) + q / block) * size;
      const uint8_t* row = bytes + (Way::kScaled ? kTile * 4 : 0);
      float* to = out + (q - from) * step + t * kTile;
      for (int64_t i = 0; i < block; i += Way::kInputs, row += Way::kBytes, to += Way::kInputs * step)
        for (int64_t n = 0; n < kTile; n += kWidth) {
          Vector values[Way::kInputs];
          way.Read(row, n, values);
          for (int j = 0; j < Way::kInputs; ++j) {
            if constexpr (Way::kScaled) values[j] *= Load(reinterpret_cast<const float*>(bytes) + n);
            Load(to + j * step + n) = values[j];
          }
        }
    }
}

}  // namespace
