// Settings of the simulated accelerator, from environment variables; tests/device/__init__.py lists them.
#pragma once
#include <cstdint>
#include <cstdlib>

namespace sim {

inline int64_t setting(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::atoll(text) : otherwise;
}

}  // namespace sim
