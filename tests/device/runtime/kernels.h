// The kernels of the device: all that Paddle has for the CPU, each put on a stream.
#pragma once
#include <cstdint>

namespace sim {

void register_kernels();

struct KernelFigures {
  uint64_t launched, waited;  // without the host, and with it
};
KernelFigures kernel_figures();

}  // namespace sim
