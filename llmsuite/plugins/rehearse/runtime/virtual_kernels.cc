#include "virtual_kernels.h"

#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kernel_table.h"
#include "paddle/phi/backends/context_pool.h"
#include "paddle/phi/core/kernel_context.h"
#include "records.h"
#include "settings.h"

namespace rehearse {
namespace {

using custom_device::Inputs;
using custom_device::Kernel;
using custom_device::Kind;
using custom_device::Outputs;
using phi::DenseTensor;

// Kernels that only GPUs have, with their gradients; see `add_kernel`.
const std::map<std::string, std::string> kOnlyGpu = {
    {"flash_attn", "tttoofbbbs>tttt"},
    {"flash_attn_grad", "ttttttotfb>ttt"},
    {"flashmask_attention", "ttttofbbbs>tttt"},
    {"flashmask_attention_grad", "ttttttttfb>ttt"},
    {"rms_norm", "toLd>tt"},
    {"rms_norm_grad", "tottLd>tt"},
    {"fused_rms_norm_ext", "ttf>tt"},
    {"fused_rms_norm_ext_grad", "ttttf>tt"},
    {"fused_rotary_position_embedding", "tooooobbf>ttt"},
    {"fused_rotary_position_embedding_grad", "oootoobbf>ttt"},
};

// Outputs that the kernel of a GPU leaves empty, by place: attention weights exist only where they are asked for.
const std::map<std::string, size_t> kLeftEmpty = {{"flash_attn", 1}, {"flashmask_attention", 1}};

double num_bytes(const DenseTensor& tensor) { return double(tensor.numel()) * phi::SizeOf(tensor.dtype()); }

// A backward pass may need the shape of a tensor only: its memory was freed, and its allocation is of nothing.
bool has_memory(const DenseTensor* tensor) { return tensor && tensor->initialized(); }

// A product of x [.., M, K] and y [.., K, N] to z [.., M, N], however they are transposed.
double product(const DenseTensor& x, const DenseTensor& y, const DenseTensor& z) {
  double batch = 1;
  for (int dim = 0; dim + 2 < y.dims().size(); ++dim) batch *= y.dims()[dim];
  return 2 * std::sqrt(double(x.numel()) * y.numel() * z.numel() / batch);
}

// Multiplications and additions of products; those of other kernels take no time beside their memory.
double flops_of(const std::string& name, const Inputs& in, const Outputs& out) {
  if ((name == "matmul" || name == "bmm" || name == "matmul_with_flatten") && in.size() > 1 && !out.empty()) {
    return product(*in[0], *in[1], *out[0]);
  }
  if (name == "addmm" && in.size() > 2 && !out.empty()) return product(*in[1], *in[2], *out[0]);
  if ((name == "matmul_grad" || name == "bmm_grad") && in.size() > 2) {
    return out.size() * product(*in[0], *in[1], *in[2]);
  }
  if (name.rfind("flash", 0) == 0 && in[0]->dims().size() == 4) {  // causal: half of two products
    const auto& query = in[0]->dims();
    const double once = 2.0 * query[0] * query[1] * in[1]->dims()[1] * query[2] * query[3];
    // without the scores that it computes again, as everybody counts
    return name.find("grad") == std::string::npos ? once : 2 * once;
  }
  return 0;
}

// Floating point numbers that nobody computes are 1: a loss and a norm are finite. Integers are 0: a valid index.
void fill(DenseTensor* tensor) {
  void* data = tensor->data();
  const int64_t count = tensor->numel();
  switch (tensor->dtype()) {
    case phi::DataType::FLOAT32:
      std::fill_n(static_cast<float*>(data), count, 1.0f);
      break;
    case phi::DataType::FLOAT64:
      std::fill_n(static_cast<double*>(data), count, 1.0);
      break;
    case phi::DataType::BFLOAT16:
      std::fill_n(static_cast<phi::bfloat16*>(data), count, phi::bfloat16(1.0f));
      break;
    case phi::DataType::FLOAT16:
      std::fill_n(static_cast<phi::float16*>(data), count, phi::float16(1.0f));
      break;
    default:
      std::memset(data, 0, size_t(num_bytes(*tensor)));
  }
}

// A call of the CPU's kernel on the same memory.
class CpuCall {
 public:
  explicit CpuCall(const Kernel& kernel) : kernel_(kernel) {
    context_.SetDeviceContext(phi::DeviceContextPool::Instance().Get(phi::CPUPlace()));
  }

  void add(Kind kind, const Inputs& tensors) {
    if (custom_device::is_list(kind, !tensors.empty())) {
      paddle::small_vector<const phi::TensorBase*> copies;
      for (auto* tensor : tensors) copies.push_back(copy_of(tensor));
      context_.EmplaceBackInputs(copies);
    } else {
      context_.EmplaceBackInput(tensors.empty() ? nullptr : copy_of(tensors[0]));
    }
  }

  void add(Kind kind, const Outputs& tensors) {
    paddle::small_vector<phi::TensorBase*> copies;
    for (auto* tensor : tensors) {
      auto* copy = copy_of(tensor);
      copies.push_back(copy);
      if (tensor) outputs_.push_back({tensor, copy});
    }
    if (kind == Kind::many) {
      context_.EmplaceBackOutputs(copies);
    } else {
      context_.EmplaceBackOutput(copies[0]);
    }
  }

  void add(const phi::Attribute& attribute) { context_.EmplaceBackAttr(attribute); }

  bool compute(const phi::CustomContext& device) {
    try {
      kernel_.cpu(&context_);
    } catch (const std::exception&) {
      return false;  // it may be one of those numbers that nobody computed
    }
    for (auto& [target, copy] : outputs_) take_over(device, target, *copy);
    return true;
  }

 private:
  DenseTensor* copy_of(const DenseTensor* tensor) {
    if (!tensor) return nullptr;
    held_.push_back(std::make_unique<DenseTensor>());
    auto* copy = held_.back().get();
    if (tensor->meta().valid()) copy->set_meta(tensor->meta());
    if (has_memory(tensor)) {
      const auto& holder = tensor->Holder();
      copy->ResetHolder(std::make_shared<phi::Allocation>(holder->ptr(), holder->size(), phi::CPUPlace()));
    }
    return copy;
  }

  static void take_over(const phi::CustomContext& device, DenseTensor* target, const DenseTensor& made) {
    if (!made.has_allocation()) return;
    if (target->has_allocation() && target->Holder()->ptr() == made.Holder()->ptr()) return target->set_meta(made.meta());
    auto meta = made.meta();
    meta.offset = 0;
    target->clear();
    target->set_meta(meta);
    void* to = device.Alloc(target, made.dtype());
    if (made.numel()) std::memcpy(to, made.data(), num_bytes(made));
  }

  const Kernel& kernel_;
  phi::KernelContext context_;
  std::vector<std::unique_ptr<DenseTensor>> held_;
  std::vector<std::pair<DenseTensor*, DenseTensor*>> outputs_;
};

// Tensors of one call.
struct Tensors {
  Inputs in;
  Outputs out, fresh;
  bool are_small = true, are_known = true;
};

void allocate(const Kernel& kernel, const phi::CustomContext& device, DenseTensor* tensor, Tensors* all) {
  if (kernel.name == "contiguous") {  // Paddle's shape function keeps the strides of the input
    auto meta = tensor->meta();
    meta.strides = meta.calc_strides(meta.dims);
    meta.offset = 0;
    tensor->set_meta(meta);
  }
  if (tensor->dtype() == phi::DataType::UNDEFINED && !kernel.is_on_cpu) tensor->set_type(kernel.type);
  if (tensor->numel() < 0 || tensor->dtype() == phi::DataType::UNDEFINED) {
    all->are_known = false;
    return;
  }
  const void* before = tensor->has_allocation() ? tensor->Holder()->ptr() : nullptr;
  device.Alloc(tensor, tensor->dtype());  // what is large enough stays, as in place
  all->are_small &= num_bytes(*tensor) <= kSmall;
  if (!tensor->has_allocation() || tensor->Holder()->ptr() == before) return;
  all->fresh.push_back(tensor);
  note_allocation(*tensor, kernel.name);
}

Tensors prepare(const Kernel& kernel, const phi::CustomContext& device, const std::vector<Inputs>& inputs,
                const std::vector<Outputs>& outputs) {
  Tensors all;
  for (auto& each : inputs) {
    for (auto* tensor : each) {
      if (!has_memory(tensor)) continue;
      all.in.push_back(tensor);
      all.are_small &= kernel.reads_shapes_only || num_bytes(*tensor) <= kSmall;
    }
  }
  const auto empty = kLeftEmpty.find(kernel.name);
  for (size_t place = 0; place < outputs.size(); ++place) {
    if (empty != kLeftEmpty.end() && empty->second == place) continue;
    for (auto* tensor : outputs[place]) {
      if (!tensor) continue;
      allocate(kernel, device, tensor, &all);
      all.out.push_back(tensor);
    }
  }
  return all;
}

bool compute(const Kernel& kernel, const phi::CustomContext& device, const std::vector<Inputs>& inputs,
             const std::vector<Outputs>& outputs, const std::vector<phi::Attribute>& attributes) {
  CpuCall call(kernel);
  for (size_t i = 0; i < inputs.size(); ++i) call.add(kernel.inputs[i], inputs[i]);
  for (auto& attribute : attributes) call.add(attribute);
  for (size_t i = 0; i < outputs.size(); ++i) call.add(kernel.outputs[i], outputs[i]);
  return call.compute(device);
}

void call(const Kernel& kernel, const phi::CustomContext& device, const std::vector<Inputs>& inputs,
          const std::vector<Outputs>& outputs, const std::vector<phi::Attribute>& attributes) {
  auto all = prepare(kernel, device, inputs, outputs);
  const bool is_computed = all.are_small && kernel.is_on_cpu && !kernel.widens &&
                           compute(kernel, device, inputs, outputs, attributes);
  if (!is_computed && !all.are_known) {
    PADDLE_THROW(common::errors::Unimplemented(
        "rehearse: the shape of an output of kernel %s depends on values of large tensors, which a virtual device does "
        "not have",
        kernel.name));
  }
  if (!is_computed) {
    for (auto* tensor : all.fresh) {
      if (tensor->numel() && num_bytes(*tensor) <= kSmall) fill(tensor);
    }
  }
  Work work;
  work.flops = flops_of(kernel.name, all.in, all.out);
  for (auto* tensor : all.in) work.bytes += kernel.reads_shapes_only ? 0 : num_bytes(*tensor);
  for (auto* tensor : all.out) work.bytes += num_bytes(*tensor);
  note(What::kernel, stream_of(device.stream()), kernel.name, work);
}

}  // namespace

void register_kernels() {
  custom_device::take_over_cpu_kernels(kDeviceType, call, [](Kernel* kernel) {
    // first, last and step are numbers of the host, which a GPU's kernel reads there
    kernel->takes_host_inputs = kernel->name == "arange_tensor";
    return true;
  });
  for (auto& [name, signature] : kOnlyGpu) {
    for (auto type : {phi::DataType::FLOAT32, phi::DataType::FLOAT16, phi::DataType::BFLOAT16}) {
      custom_device::add_kernel(kDeviceType, name, signature, type, call);
    }
  }
  custom_device::seal_kernels();
}

}  // namespace rehearse
