// Helpers of the kernels. All tensors are contiguous and in host memory, and float32 unless a kernel says more.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "paddle/phi/api/ext/op_meta_info.h"
#include "paddle/phi/api/include/api.h"
#include "paddle/phi/api/include/tensor.h"

using Tensor = paddle::Tensor;

inline Tensor Like(const Tensor& x) { return paddle::experimental::empty(x.shape(), x.dtype(), x.place()); }
inline Tensor Floats(std::vector<int64_t> shape, const Tensor& x) { return paddle::experimental::empty(shape, x.dtype(), x.place()); }

inline void Check(const Tensor& x, const char* name) {
  PD_CHECK(x.is_contiguous(), name, " has gaps; it has to be contiguous");
  PD_CHECK(x.dtype() == paddle::DataType::FLOAT32, name, " has to be float32");
}

// The numbers of a tensor, which a kernel may write to: a tensor shares its memory with its copies.
inline float* Data(const Tensor& x, const char* name) {
  Check(x, name);
  return const_cast<float*>(x.data<float>());
}

// A part of one of several tensors, for a thread to pass over.
struct Chunk {
  size_t tensor;
  int64_t begin, end;
};

inline std::vector<Chunk> Chunks(const std::vector<Tensor>& tensors) {
  constexpr int64_t kSize = 1 << 14;
  std::vector<Chunk> chunks;
  for (size_t i = 0; i < tensors.size(); ++i)
    for (int64_t begin = 0; begin < tensors[i].numel(); begin += kSize)
      chunks.push_back({i, begin, std::min(tensors[i].numel(), begin + kSize)});
  return chunks;
}

// e^x for a loop that the compiler vectorises: x = n ln 2 + r, e^r by a polynomial (Cephes, expf.c), 2^n by its bits.
// Within 2e-7 of the value; 0 below -87.3, where float32 has no normal numbers; NaN stays NaN.
inline float Exp(float x) {
  float y = x > 88.f ? 88.f : x;
  y = y < -88.f ? -88.f : y;
  float shifted = y * 1.44269504f + 12582912.f;  // 1.5 * 2^23: the rounded n is in the lowest bits
  float n = shifted - 12582912.f;
  float r = y - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.f;
  int32_t bits;
  std::memcpy(&bits, &shifted, 4);
  bits = (bits - 0x4B400000 + 127) << 23;
  float power;
  std::memcpy(&power, &bits, 4);
  return x < -87.3f ? 0.f : p * power;
}
