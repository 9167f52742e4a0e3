// The kernels of a device of Paddle's CustomDevice interface: all that Paddle's CPU wheel has for the CPU, each calling
// one function. Eager mode calls kernels with C++ arguments of their own types, programs with a KernelContext; either
// call becomes lists of tensors and attributes.
#pragma once
#include <string>
#include <vector>

#include "paddle/phi/backends/custom/custom_context.h"
#include "paddle/phi/core/dense_tensor.h"
#include "paddle/phi/core/kernel_factory.h"

namespace custom_device {

using Inputs = std::vector<const phi::DenseTensor*>;
using Outputs = std::vector<phi::DenseTensor*>;

// A tensor, an optional one, a list, an optional list, a list of tensors that need not be dense.
enum class Kind { one, maybe, many, maybe_many, many_of_any };

inline bool is_list(Kind kind, bool has_tensors) {
  return kind == Kind::many || kind == Kind::many_of_any || (kind == Kind::maybe_many && has_tensors);
}

struct Kernel {
  std::string name;
  phi::Kernel cpu;     // the CPU's; only a definition of arguments where the CPU has none
  phi::DataType type;  // of the device's kernel
  bool widens;         // the CPU's kernel is float32's, as it has none for this 16-bit type
  bool is_on_cpu = true;
  std::vector<Kind> inputs, outputs;
  bool reads_shapes_only = false;  // of its inputs
  bool takes_host_inputs = false;  // as they are: else Paddle copies them to the device
  mutable bool waits = false;      // for the device: the host has to wait for it
  mutable bool is_new = true;      // for the device: it was not called yet
};

using CallKernel = void (*)(const Kernel& kernel, const phi::CustomContext& device, const std::vector<Inputs>& inputs,
                            const std::vector<Outputs>& outputs, const std::vector<phi::Attribute>& attributes);

// Registers all kernels of the CPU that need no other memory than their arguments. `prepare` may set fields of each;
// it returns false for those to leave out.
void take_over_cpu_kernels(const std::string& device_type, CallKernel call, bool (*prepare)(Kernel*));

// Registers a kernel that the CPU does not have. In the signature are inputs, attributes, then behind > outputs:
// t tensor, o optional tensor, T list of tensors; b bool, i int32, l int64, f float, d double, s string, L int64 list.
void add_kernel(const std::string& device_type, const std::string& name, const std::string& signature,
                phi::DataType type, CallKernel call);

void seal_kernels();  // after the last of them, before the first call

}  // namespace custom_device
