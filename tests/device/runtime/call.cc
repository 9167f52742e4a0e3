#include "call.h"

#include <atomic>
#include <cstdio>
#include <memory>
#include <set>
#include <utility>

#include "kernels.h"
#include "memory.h"
#include "paddle/phi/backends/cpu/cpu_context.h"
#include "paddle/phi/core/generator.h"
#include "paddle/phi/core/kernel_context.h"
#include "paddle/phi/core/memory/allocation/allocator_facade.h"
#include "settings.h"
#include "streams.h"

namespace sim {
namespace {

using phi::DenseTensor;

std::atomic<uint64_t> num_launched{0}, num_waited{0};

// The CPU's, but with the device's random numbers. One device for each process.
phi::CPUContext* cpu_context(const phi::Place& place) {
  static phi::CPUContext* context = [&] {
    auto* made = new phi::CPUContext(phi::CPUPlace());
    auto& facade = paddle::memory::allocation::AllocatorFacade::Instance();
    made->SetAllocator(facade.GetAllocator(phi::CPUPlace()).get());
    made->SetHostAllocator(facade.GetAllocator(phi::CPUPlace()).get());
    made->SetZeroAllocator(facade.GetZeroAllocator(phi::CPUPlace()).get());
    made->SetHostZeroAllocator(facade.GetZeroAllocator(phi::CPUPlace()).get());
    made->SetGenerator(phi::DefaultCustomDeviceGenerator(phi::CustomPlace("sim", place.GetDeviceId())).get());
    made->SetHostGenerator(phi::DefaultCPUGenerator().get());
    return made;
  }();
  return context;
}

bool is_on_device(const DenseTensor& tensor) { return tensor.has_allocation() && is_device(tensor.Holder()->ptr()); }

size_t num_bytes(const DenseTensor& tensor) { return tensor.numel() * phi::SizeOf(tensor.dtype()); }

// From the first to the last byte, with what strides leave out between.
Span span_of(const DenseTensor& tensor) {
  if (tensor.numel() <= 0) return {nullptr, 0};
  const auto& strides = tensor.meta().strides;
  size_t last = 0;
  for (int dim = 0; dim < tensor.dims().size(); ++dim) {
    last += (tensor.dims()[dim] - 1) * (strides.size() == tensor.dims().size() ? strides[dim] : 0);
  }
  const size_t count = strides.size() == tensor.dims().size() ? last + 1 : tensor.numel();
  return {static_cast<const char*>(tensor.Holder()->ptr()) + tensor.offset(), count * phi::SizeOf(tensor.dtype())};
}

bool is_short(phi::DataType type) { return type == phi::DataType::BFLOAT16 || type == phi::DataType::FLOAT16; }

template <typename From, typename To>
void convert(const void* from, void* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    static_cast<To*>(to)[i] = static_cast<To>(static_cast<float>(static_cast<const From*>(from)[i]));
  }
}

// The same numbers in float32. A tensor with strides becomes a dense one only where its memory has no gaps, which is so
// for what Paddle gives to kernels that do not know strides.
DenseTensor widened(const phi::CPUContext& cpu, const DenseTensor& tensor) {
  DenseTensor wide;
  wide.Resize(tensor.dims());
  float* to = cpu.Alloc<float>(&wide);
  if (tensor.dtype() == phi::DataType::BFLOAT16) {
    convert<phi::bfloat16, float>(tensor.data(), to, tensor.numel());
  } else {
    convert<phi::float16, float>(tensor.data(), to, tensor.numel());
  }
  return wide;
}

// Rounds to nearest, even.
void round_to(const phi::CPUContext& cpu, const DenseTensor& wide, DenseTensor* tensor, phi::DataType type) {
  tensor->Resize(wide.dims());
  void* to = cpu.Alloc(tensor, type);
  if (type == phi::DataType::BFLOAT16) {
    convert<float, phi::bfloat16>(wide.data(), to, wide.numel());
  } else {
    convert<float, phi::float16>(wide.data(), to, wide.numel());
  }
}

// What the stream gets.
class Call {
 public:
  Call(const Kernel& kernel, phi::CPUContext* cpu) : kernel_(kernel), cpu_(cpu) { context_.SetDeviceContext(cpu); }

  struct Output {
    DenseTensor* target;  // the caller's: only the host may touch it, while the call is made
    DenseTensor* copy;
    bool is_fresh;  // holds nothing yet: no value of before is read
  };

  void add_input(const DenseTensor* tensor) { context_.EmplaceBackInput(copy_of(tensor)); }

  void add_inputs(const Inputs& tensors) {
    paddle::small_vector<const phi::TensorBase*> copies;
    for (auto* tensor : tensors) copies.push_back(copy_of(tensor));
    context_.EmplaceBackInputs(copies);
  }

  void add_attribute(phi::Attribute attribute) {
    auto* type = paddle::get_if<phi::DataType>(&attribute);
    if (kernel_.widens && type && is_short(*type)) attribute = phi::DataType::FLOAT32;
    context_.EmplaceBackAttr(attribute);
  }

  void add_output(DenseTensor* tensor, const std::set<DenseTensor*>& fresh) {
    context_.EmplaceBackOutput(output_copy_of(tensor, fresh));
  }

  void add_outputs(const Outputs& tensors, const std::set<DenseTensor*>& fresh) {
    paddle::small_vector<phi::TensorBase*> copies;
    for (auto* tensor : tensors) copies.push_back(output_copy_of(tensor, fresh));
    context_.EmplaceBackOutputs(copies);
  }

  std::vector<Output>& outputs() { return outputs_; }

  void compute() {
    if (!kernel_.widens) return kernel_.cpu(&context_);
    std::vector<std::pair<DenseTensor*, DenseTensor>> narrow;
    for (auto& tensor : held_) {
      if (!is_short(tensor->dtype())) continue;
      narrow.emplace_back(tensor.get(), *tensor);
      if (tensor->initialized() && !is_fresh(tensor.get())) {
        *tensor = widened(*cpu_, *tensor);
      } else {
        tensor->clear();
        tensor->set_type(phi::DataType::FLOAT32);
      }
    }
    kernel_.cpu(&context_);
    for (auto& [tensor, before] : narrow) {
      if (!is_output(tensor)) continue;
      const DenseTensor wide = *tensor;
      if (wide.has_allocation() && wide.dtype() != phi::DataType::FLOAT32) continue;  // never of 16 bits
      *tensor = before;
      if (wide.has_allocation()) round_to(*cpu_, wide, tensor, before.dtype());
    }
  }

 private:
  // Nobody holds the memory for it: as on a GPU, it may be another's by the time that the stream comes to it.
  phi::TensorBase* copy_of(const DenseTensor* tensor) {
    if (!tensor) return nullptr;
    held_.push_back(std::make_unique<DenseTensor>(*tensor));
    auto* copy = held_.back().get();
    if (is_on_device(*copy)) {
      const auto& holder = copy->Holder();
      copy->ResetHolder(std::make_shared<phi::Allocation>(inner(holder->ptr()), holder->size(), phi::CPUPlace()));
    }
    return copy;
  }

  phi::TensorBase* output_copy_of(DenseTensor* tensor, const std::set<DenseTensor*>& fresh) {
    auto* copy = static_cast<DenseTensor*>(copy_of(tensor));
    if (tensor) outputs_.push_back({tensor, copy, fresh.count(tensor) > 0 || !copy->has_allocation()});
    return copy;
  }

  bool is_output(const DenseTensor* tensor) const {
    for (auto& output : outputs_)
      if (output.copy == tensor) return true;
    return false;
  }

  bool is_fresh(const DenseTensor* tensor) const {
    for (auto& output : outputs_)
      if (output.copy == tensor && output.is_fresh) return true;
    return false;
  }

  const Kernel& kernel_;
  phi::CPUContext* cpu_;
  phi::KernelContext context_;
  std::vector<std::unique_ptr<DenseTensor>> held_;
  std::vector<Output> outputs_;
};

[[noreturn]] void end_process(const Kernel& kernel, const char* why) {
  std::fprintf(stderr, "sim: kernel %s: %s\n", kernel.name.c_str(), why);
  std::abort();
}

// Takes over what a kernel has put elsewhere than into the memory of its output.
void take_over(const phi::CustomContext& device, const Call::Output& output) {
  if (!output.copy->has_allocation()) return;
  const void* from = output.copy->Holder()->ptr();
  if (is_on_device(*output.target) && inner(output.target->Holder()->ptr()) == from) {
    output.target->set_meta(output.copy->meta());
    return;
  }
  auto meta = output.copy->meta();
  const size_t offset = meta.offset;
  meta.offset = 0;
  output.target->clear();
  output.target->set_meta(meta);
  void* to = device.Alloc(output.target, output.copy->dtype());
  if (num_bytes(*output.copy)) std::memcpy(inner(to), static_cast<const char*>(from) + offset, num_bytes(*output.copy));
}

void run_and_wait(const Kernel& kernel, Call* call, Stream* stream, const Access& access,
                  const phi::CustomContext& device) {
  ++num_waited;
  std::vector<phi::DDim> said;
  for (auto& output : call->outputs()) said.push_back(output.target->dims());
  std::exception_ptr error;
  stream->put(access, [&] {
    try {
      call->compute();
    } catch (...) {
      error = std::current_exception();
    }
  });
  stream->drain();  // an order of nothing: on a GPU most of these kernels do not wait
  if (error) std::rethrow_exception(error);
  for (size_t i = 0; i < said.size(); ++i) kernel.waits |= call->outputs()[i].copy->dims() != said[i];
  kernel.is_new = false;
  Access written{kernel.name, {}, {}};
  for (auto& output : call->outputs()) {
    take_over(device, output);
    if (is_on_device(*output.target)) written.writes.push_back(span_of(*output.target));
  }
  launch(stream->number(), written);
}

void run_later(const Kernel& kernel, std::shared_ptr<Call> call, Stream* stream, const Access& access) {
  ++num_launched;
  struct Place {
    void* data;
    phi::DDim dims;
    size_t fresh_bytes;
  };
  std::vector<Place> places;
  for (auto& output : call->outputs()) {
    void* data = output.copy->has_allocation() ? output.copy->Holder()->ptr() : nullptr;
    const bool is_poisoned = output.is_fresh && data && output.copy->numel() > 0;
    places.push_back({data, output.copy->dims(), is_poisoned ? num_bytes(*output.copy) : 0});
  }
  stream->put(access, [&kernel, call, places] {
    for (auto& place : places) poison(place.data, place.fresh_bytes);
    be_late();
    try {
      call->compute();
    } catch (const std::exception& error) {
      end_process(kernel, error.what());
    }
    for (size_t i = 0; i < places.size(); ++i) {
      auto* copy = call->outputs()[i].copy;
      if (!copy->has_allocation() || copy->Holder()->ptr() == places[i].data) continue;
      // it has shared an input's memory, or has taken some of its own
      if (copy->numel() != phi::product(places[i].dims)) end_process(kernel, "an output has another size than was said");
      std::memmove(places[i].data, copy->data(), num_bytes(*copy));
    }
  });
}

// Allocates outputs. Returns false where a size is not known before the kernel has run.
bool allocate_outputs(const phi::CustomContext& device, const std::vector<Outputs>& outputs,
                      std::set<DenseTensor*>* fresh) {
  bool are_known = true;
  for (auto& each : outputs) {
    for (auto* tensor : each) {
      if (!tensor) continue;
      const void* before = is_on_device(*tensor) ? tensor->Holder()->ptr() : nullptr;
      if (tensor->numel() < 0 || tensor->dtype() == phi::DataType::UNDEFINED) {
        are_known = false;
        continue;
      }
      device.Alloc(tensor, tensor->dtype());  // what is large enough stays, as in place
      if (tensor->has_allocation() && tensor->Holder()->ptr() != before) fresh->insert(tensor);
    }
  }
  return are_known;
}

bool has_host_input(const std::vector<Inputs>& inputs) {
  for (auto& each : inputs)
    for (auto* tensor : each)
      if (tensor && tensor->has_allocation() && !is_on_device(*tensor)) return true;
  return false;
}

Access access_of(const Kernel& kernel, const std::vector<Inputs>& inputs, const std::vector<Outputs>& outputs) {
  Access access{kernel.name, {}, {}};
  for (auto& each : inputs) {
    for (auto* tensor : each) {
      if (tensor && is_on_device(*tensor) && !kernel.reads_shapes_only) access.reads.push_back(span_of(*tensor));
    }
  }
  for (auto& each : outputs) {
    for (auto* tensor : each) {
      if (tensor && is_on_device(*tensor)) access.writes.push_back(span_of(*tensor));
    }
  }
  return access;
}

}  // namespace

void call(const Kernel& kernel, const phi::CustomContext& device, const std::vector<Inputs>& inputs,
          const std::vector<Outputs>& outputs, const std::vector<phi::Attribute>& attributes) {
  static const bool always_waits = setting("SIM_SYNC", 0);
  std::set<DenseTensor*> fresh;
  bool waits = kernel.waits || kernel.is_new || always_waits || has_host_input(inputs);
  if (!waits) waits = !allocate_outputs(device, outputs, &fresh);
  auto made = std::make_shared<Call>(kernel, cpu_context(device.GetPlace()));
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (custom_device::is_list(kernel.inputs[i], !inputs[i].empty())) {
      made->add_inputs(inputs[i]);
    } else {
      made->add_input(inputs[i].empty() ? nullptr : inputs[i][0]);
    }
  }
  for (auto& attribute : attributes) made->add_attribute(attribute);
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (kernel.outputs[i] == Kind::many) {
      made->add_outputs(outputs[i], fresh);
    } else {
      made->add_output(outputs[i][0], fresh);
    }
  }
  auto* stream = stream_of(reinterpret_cast<C_Stream>(device.stream()));
  const auto access = access_of(kernel, inputs, outputs);
  if (waits) return run_and_wait(kernel, made.get(), stream, access, device);
  run_later(kernel, made, stream, access);
}

KernelFigures kernel_figures() { return {num_launched, num_waited}; }

}  // namespace sim
