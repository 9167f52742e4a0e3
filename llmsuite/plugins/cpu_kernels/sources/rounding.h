// float32 to bfloat16, to nearest even.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "paddle/phi/api/ext/op_meta_info.h"
#include "paddle/phi/api/include/api.h"
#include "paddle/phi/api/include/tensor.h"

namespace rounding {

inline uint16_t Half(float value) {  // a loop over it is vectorised
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  return (bits & 0x7FFFFFFF) > 0x7F800000 ? uint16_t(bits >> 16 | 0x40) : uint16_t(rounded);  // NaN stays NaN
}

inline float Whole(uint16_t half) {
  const uint32_t bits = uint32_t(half) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// A number of either type as float32, and to either type.
inline float Wide(float x) { return x; }
inline float Wide(uint16_t x) { return Whole(x); }
inline void Put(float x, float& to) { to = x; }
inline void Put(float x, uint16_t& to) { to = Half(x); }

// to[i] = f(from[i]) on all threads; a lambda for f is put in the loop, a function would be called for each
template <typename From, typename To, typename F>
void Each(const From* from, To* to, int64_t count, F f) {
  const int64_t chunk = 1 << 14;
#pragma omp parallel for if (count > 4 * chunk)
  for (int64_t begin = 0; begin < count; begin += chunk) {
    const int64_t end = std::min(begin + chunk, count);
    for (int64_t i = begin; i < end; ++i) to[i] = f(from[i]);
  }
}

inline bool IsBf16(const paddle::Tensor& x) {
  const bool is_bf16 = x.dtype() == paddle::DataType::BFLOAT16;
  PD_CHECK((is_bf16 || x.dtype() == paddle::DataType::FLOAT32) && x.is_contiguous(),
           "float32 or bfloat16 without gaps is needed");
  return is_bf16;
}

inline paddle::Tensor New(const std::vector<int64_t>& shape, paddle::DataType type, const paddle::Tensor& like) {
  return paddle::experimental::empty(shape, type, like.place());
}

// x as bfloat16, itself where it is
inline paddle::Tensor ToBf16(const paddle::Tensor& x) {
  if (IsBf16(x)) return x;
  paddle::Tensor y = New(x.shape(), paddle::DataType::BFLOAT16, x);
  Each(x.data<float>(), static_cast<uint16_t*>(y.data()), x.numel(), [](float value) { return Half(value); });
  return y;
}

}  // namespace rounding
