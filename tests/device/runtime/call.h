// One call of a kernel: the host's part, and what goes to the stream.
//
// On the stream runs the CPU's kernel, with copies of the tensors that lie in the inner view of device memory and so are
// tensors of the CPU. The host allocates outputs, as a CUDA kernel's launcher does, with the sizes that InferMeta said.
#pragma once
#include <string>
#include <vector>

#include "kernel_table.h"

namespace sim {

using custom_device::Inputs;
using custom_device::Kernel;
using custom_device::Kind;
using custom_device::Outputs;

// Throws what the kernel throws where the host waits for it, and errors of order; an error later ends the process.
void call(const Kernel& kernel, const phi::CustomContext& device, const std::vector<Inputs>& inputs,
          const std::vector<Outputs>& outputs, const std::vector<phi::Attribute>& attributes);

}  // namespace sim
