// Settings of the virtual device, from environment variables that `llmsuite rehearse` sets.
#pragma once
#include <cstdint>
#include <cstdlib>

namespace rehearse {

// Paddle's Python takes the paths of a GPU where "gpu" is in the name of a type of devices.
constexpr char kDeviceType[] = "virtual_gpu";

// Tensors up to so many bytes have values: lengths, masks and indices are those of a real run.
constexpr size_t kSmall = 64 << 10;

inline int64_t setting(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::atoll(text) : otherwise;
}

}  // namespace rehearse
