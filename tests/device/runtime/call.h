// One call of a kernel: the host's part, and what goes to the stream.
//
// On the stream runs the CPU's kernel, with copies of the tensors that lie in the inner view of device memory and so are
// tensors of the CPU. The host allocates outputs, as a CUDA kernel's launcher does, with the sizes that InferMeta said.
#pragma once
#include <string>
#include <vector>

#include "paddle/phi/backends/custom/custom_context.h"
#include "paddle/phi/core/dense_tensor.h"
#include "paddle/phi/core/kernel_factory.h"

namespace sim {

using Inputs = std::vector<const phi::DenseTensor*>;
using Outputs = std::vector<phi::DenseTensor*>;

// A tensor, an optional one, a list, an optional list; a list whose tensors may be sparse, and here are not.
enum class Kind { one, maybe, many, maybe_many, many_of_any_type };

struct Kernel {
  std::string name;
  phi::Kernel cpu;
  bool widens;  // the CPU's kernel is float32's, as it has none for these 16 bits: see `widened`
  std::vector<Kind> inputs, outputs;
  bool reads_shapes_only;  // of its inputs
  mutable bool waits;      // the host waits for it, since sizes of outputs or the order of random numbers depend on it
  mutable bool is_new = true;  // the first time the host waits, and compares sizes of outputs with those that were said
};

// Throws what the kernel throws where the host waits for it, and errors of order; an error later ends the process.
void call(const Kernel& kernel, const phi::CustomContext& device, const std::vector<Inputs>& inputs,
          const std::vector<Outputs>& outputs, const std::vector<phi::Attribute>& attributes);

}  // namespace sim
