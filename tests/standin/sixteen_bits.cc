// What Paddle 3.3.1 does in bfloat16 and float16 on GPUs and not on CPUs; loading the library registers it.
//
// Kernels: the CPU's float32 kernel of the same name, on inputs that are widened, its outputs rounded.
// Other placements of a distributed tensor (its switch over dtypes, reshard_utils.h, has no 16 bits for CPUs): those of
// the widened tensor.
#include <memory>
#include <tuple>

#include "paddle/phi/backends/cpu/cpu_context.h"
#include "paddle/phi/core/dense_tensor.h"
#include "paddle/phi/core/distributed/auto_parallel/dist_tensor.h"
#include "paddle/phi/core/distributed/auto_parallel/reshard/reshard_function_registry.h"
#include "paddle/phi/core/kernel_factory.h"
#include "paddle/phi/core/kernel_utils.h"
#include "paddle/phi/kernels/abs_kernel.h"
#include "paddle/phi/kernels/activation_grad_kernel.h"
#include "paddle/phi/kernels/activation_kernel.h"
#include "paddle/phi/kernels/all_gather_kernel.h"
#include "paddle/phi/kernels/all_reduce_kernel.h"
#include "paddle/phi/kernels/concat_grad_kernel.h"
#include "paddle/phi/kernels/cum_kernel.h"
#include "paddle/phi/kernels/einsum_kernel.h"
#include "paddle/phi/kernels/elementwise_add_grad_kernel.h"
#include "paddle/phi/kernels/elementwise_add_kernel.h"
#include "paddle/phi/kernels/elementwise_divide_grad_kernel.h"
#include "paddle/phi/kernels/elementwise_divide_kernel.h"
#include "paddle/phi/kernels/elementwise_multiply_grad_kernel.h"
#include "paddle/phi/kernels/elementwise_multiply_kernel.h"
#include "paddle/phi/kernels/elementwise_subtract_grad_kernel.h"
#include "paddle/phi/kernels/elementwise_subtract_kernel.h"
#include "paddle/phi/kernels/expand_grad_kernel.h"
#include "paddle/phi/kernels/expand_kernel.h"
#include "paddle/phi/kernels/flatten_grad_kernel.h"
#include "paddle/phi/kernels/flatten_kernel.h"
#include "paddle/phi/kernels/gather_grad_kernel.h"
#include "paddle/phi/kernels/gather_kernel.h"
#include "paddle/phi/kernels/gather_nd_grad_kernel.h"
#include "paddle/phi/kernels/gather_nd_kernel.h"
#include "paddle/phi/kernels/index_add_kernel.h"
#include "paddle/phi/kernels/gelu_grad_kernel.h"
#include "paddle/phi/kernels/gelu_kernel.h"
#include "paddle/phi/kernels/index_select_grad_kernel.h"
#include "paddle/phi/kernels/index_select_kernel.h"
#include "paddle/phi/kernels/layer_norm_grad_kernel.h"
#include "paddle/phi/kernels/layer_norm_kernel.h"
#include "paddle/phi/kernels/matmul_grad_kernel.h"
#include "paddle/phi/kernels/matmul_kernel.h"
#include "paddle/phi/kernels/reduce_mean_grad_kernel.h"
#include "paddle/phi/kernels/reduce_mean_kernel.h"
#include "paddle/phi/kernels/reduce_max_kernel.h"
#include "paddle/phi/kernels/reduce_scatter_kernel.h"
#include "paddle/phi/kernels/roll_kernel.h"
#include "paddle/phi/kernels/scatter_kernel.h"
#include "paddle/phi/kernels/softmax_grad_kernel.h"
#include "paddle/phi/kernels/softmax_kernel.h"
#include "paddle/phi/kernels/squared_l2_norm_kernel.h"
#include "paddle/phi/kernels/stack_grad_kernel.h"
#include "paddle/phi/kernels/take_along_axis_grad_kernel.h"
#include "paddle/phi/kernels/take_along_axis_kernel.h"
#include "paddle/phi/kernels/tile_grad_kernel.h"
#include "paddle/phi/kernels/tile_kernel.h"
#include "paddle/phi/kernels/unsqueeze_grad_kernel.h"
#include "paddle/phi/kernels/unsqueeze_kernel.h"
#include "paddle/phi/kernels/unstack_grad_kernel.h"
#include "paddle/phi/kernels/unstack_kernel.h"
#include "paddle/phi/kernels/where_grad_kernel.h"
#include "paddle/phi/kernels/where_kernel.h"

namespace {

using phi::CPUContext;
using phi::DataType;
using phi::DenseTensor;
using phi::distributed::DistTensor;
using phi::distributed::TensorDistAttr;

template <typename From, typename To>
void copy(const CPUContext& context, const DenseTensor& from, DenseTensor* to) {
  auto* target = context.Alloc<To>(to);
  if (from.numel() == 0) return;
  const auto* source = from.data<From>();
  for (int64_t i = 0; i < from.numel(); i++) target[i] = static_cast<To>(source[i]);
}

bool is_short(const DenseTensor& tensor) {
  return tensor.dtype() == DataType::BFLOAT16 || tensor.dtype() == DataType::FLOAT16;
}

DenseTensor widened(const CPUContext& context, const DenseTensor& tensor) {
  if (!is_short(tensor)) return tensor;
  DenseTensor wide(std::shared_ptr<phi::Allocation>(), phi::DenseTensorMeta(DataType::FLOAT32, tensor.dims()));
  if (!tensor.initialized()) return wide;  // a kernel that only asks for the shape
  if (tensor.dtype() == DataType::BFLOAT16) {
    copy<phi::dtype::bfloat16, float>(context, tensor, &wide);
  } else {
    copy<phi::dtype::float16, float>(context, tensor, &wide);
  }
  return wide;
}

void round_to(const CPUContext& context, const DenseTensor& wide, DenseTensor* target) {
  if (target->dtype() == DataType::BFLOAT16) {
    copy<float, phi::dtype::bfloat16>(context, wide, target);
  } else {
    copy<float, phi::dtype::float16>(context, wide, target);
  }
}

// An argument of a kernel: most go on as they are.
template <typename T>
struct Argument {
  T value;
  Argument(const CPUContext&, T value) : value(value) {}
  T wide() { return value; }
  void finish(const CPUContext&) {}
};

template <>
struct Argument<const DenseTensor&> {
  DenseTensor value;
  Argument(const CPUContext& context, const DenseTensor& tensor) : value(widened(context, tensor)) {}
  const DenseTensor& wide() { return value; }
  void finish(const CPUContext&) {}
};

template <>
struct Argument<const paddle::optional<DenseTensor>&> {
  paddle::optional<DenseTensor> value;
  Argument(const CPUContext& context, const paddle::optional<DenseTensor>& tensor) {
    if (tensor) value = widened(context, *tensor);
  }
  const paddle::optional<DenseTensor>& wide() { return value; }
  void finish(const CPUContext&) {}
};

template <>
struct Argument<const std::vector<const DenseTensor*>&> {
  std::vector<DenseTensor> values;
  std::vector<const DenseTensor*> pointers;
  Argument(const CPUContext& context, const std::vector<const DenseTensor*>& tensors) {
    for (const auto* tensor : tensors) values.push_back(widened(context, *tensor));
    for (const auto& value : values) pointers.push_back(&value);
  }
  const std::vector<const DenseTensor*>& wide() { return pointers; }
  void finish(const CPUContext&) {}
};

template <>
struct Argument<DenseTensor*> {
  DenseTensor* target;
  DenseTensor value;
  bool rounds;
  Argument(const CPUContext&, DenseTensor* tensor) : target(tensor), rounds(tensor != nullptr && is_short(*tensor)) {
    if (rounds) value.Resize(tensor->dims());
  }
  DenseTensor* wide() { return rounds ? &value : target; }
  void finish(const CPUContext& context) {
    if (!rounds || (!value.initialized() && value.numel() > 0)) return;  // nobody asked for this output
    target->Resize(value.dims());
    round_to(context, value, target);
  }
};

template <>
struct Argument<std::vector<DenseTensor*>> {
  std::vector<Argument<DenseTensor*>> outputs;
  Argument(const CPUContext& context, const std::vector<DenseTensor*>& tensors) {
    for (auto* tensor : tensors) outputs.emplace_back(context, tensor);
  }
  std::vector<DenseTensor*> wide() {
    std::vector<DenseTensor*> pointers;
    for (auto& output : outputs) pointers.push_back(output.wide());
    return pointers;
  }
  void finish(const CPUContext& context) {
    for (auto& output : outputs) output.finish(context);
  }
};

template <int Id, typename Function>
struct Filled;

template <int Id, typename... Arguments>
struct Filled<Id, void (*)(const CPUContext&, Arguments...)> {
  using Function = void (*)(const CPUContext&, Arguments...);
  static inline Function plain = nullptr;

  static void run(const CPUContext& context, Arguments... arguments) {
    std::tuple<Argument<Arguments>...> held{Argument<Arguments>(context, arguments)...};
    std::apply([&](auto&... each) { plain(context, each.wide()...); }, held);
    std::apply([&](auto&... each) { (each.finish(context), ...); }, held);
  }
};

// `replaces`: also in the place of kernels that there are.
template <int Id, typename Function>
void fill(const std::string& name, bool replaces = false) {
  auto& all = phi::KernelFactory::Instance().kernels();
  auto found = all.find(name);
  if (found == all.end()) PADDLE_THROW("Paddle has no kernel " + name);
  auto& kernels = found->second;
  const phi::KernelKey wide(phi::Backend::CPU, phi::DataLayout::ALL_LAYOUT, DataType::FLOAT32);
  const phi::Kernel plain = kernels.at(wide);
  Filled<Id, Function>::plain = plain.GetVariadicKernelFn<Function>();
  for (const auto dtype : {DataType::BFLOAT16, DataType::FLOAT16}) {
    const phi::KernelKey key(phi::Backend::CPU, phi::DataLayout::ALL_LAYOUT, dtype);
    if (kernels.count(key) && !replaces) continue;
    kernels.erase(key);
    // programs call a kernel by its context, which has the arguments in a list
    const auto in_programs = &phi::KernelImpl<Function, &Filled<Id, Function>::run>::Compute;
    phi::Kernel kernel(in_programs, reinterpret_cast<void*>(&Filled<Id, Function>::run));
    *kernel.mutable_args_def() = plain.args_def();
    for (auto& input : kernel.mutable_args_def()->input_defs()) {
      if (input.dtype == DataType::FLOAT32) input.SetDataType(dtype);
    }
    for (auto& output : kernel.mutable_args_def()->output_defs()) {
      if (output.dtype == DataType::FLOAT32) output.SetDataType(dtype);
    }
    kernels.emplace(key, kernel);
  }
}

// Messages of programs: the kernels of float32 are llmsuite's own there, which send whatever a tensor has.
void fill_messages(const std::string& name) {
  auto& kernels = phi::KernelFactory::Instance().kernels().at(name);
  const phi::Kernel plain = kernels.at({phi::Backend::CPU, phi::DataLayout::ALL_LAYOUT, DataType::FLOAT32});
  for (const auto dtype : {DataType::BFLOAT16, DataType::FLOAT16}) {
    const phi::KernelKey key(phi::Backend::CPU, phi::DataLayout::ALL_LAYOUT, dtype);
    kernels.erase(key);
    kernels.emplace(key, plain);
  }
}

class WidenedReshard final : public phi::distributed::ReshardFunction {
 public:
  bool IsSuitable(const DistTensor& in, const TensorDistAttr&) override { return is_short(in.value()); }

  void Eval(phi::DeviceContext* context, const DistTensor& in, const TensorDistAttr& to, DistTensor* out) override {
    const auto& cpu = static_cast<const CPUContext&>(*context);
    const DistTensor wide(std::make_shared<DenseTensor>(widened(cpu, in.value())), in.dims(), in.dist_attr());
    const auto moved = phi::distributed::ChooseProperReshardFunction(wide, to)->Eval(context, wide, to);
    DenseTensor value(std::shared_ptr<phi::Allocation>(), phi::DenseTensorMeta(in.dtype(), moved->value().dims()));
    if (moved->value().initialized()) round_to(cpu, moved->value(), &value);
    SetValue(out, value);
    SetDistProps(out, in.dims(), to);
  }

  std::string Name() override { return "WidenedReshard"; }
};

#define FILL(name, function, ...) fill<__COUNTER__, decltype(&phi::function<float, CPUContext>)>(name, ##__VA_ARGS__);

[[maybe_unused]] const bool is_filled = [] {
  FILL("all_gather", AllGatherKernel)
  FILL("all_reduce", AllReduceKernel, true)  // Gloo adds up float16 wrongly: small sums become infinite
  FILL("reduce_scatter", ReduceScatterKernel, true)
  FILL("add", AddKernel)
  FILL("add_grad", AddGradKernel)
  FILL("divide", DivideKernel)
  FILL("divide_grad", DivideGradKernel)
  FILL("matmul", MatmulKernel)
  FILL("matmul_grad", MatmulGradKernel)
  FILL("einsum", EinsumKernel)
  FILL("mean", MeanKernel)
  FILL("mean_grad", ReduceMeanGradKernel)
  FILL("flatten", FlattenKernel)
  FILL("flatten_grad", FlattenGradKernel)
  FILL("softmax", SoftmaxKernel)
  FILL("softmax_grad", SoftmaxGradKernel)
  FILL("sigmoid", SigmoidKernel)
  FILL("sigmoid_grad", SigmoidGradKernel)
  FILL("silu", SiluKernel)
  FILL("silu_grad", SiluGradKernel)
  FILL("gelu", GeluKernel)
  FILL("gelu_grad", GeluGradKernel)
  FILL("layer_norm", LayerNormKernel)
  FILL("layer_norm_grad", LayerNormGradKernel)
  FILL("where", WhereKernel)
  FILL("where_grad", WhereGradKernel)
  FILL("expand", ExpandKernel)
  FILL("expand_grad", ExpandGradKernel)
  FILL("tile", TileKernel)
  FILL("tile_grad", TileGradKernel)
  FILL("concat_grad", ConcatGradKernel)
  FILL("stack_grad", StackGradKernel)
  FILL("unstack", UnStackKernel)
  FILL("unstack_grad", UnStackGradKernel)
  FILL("unsqueeze", UnsqueezeKernel)
  FILL("unsqueeze_grad", UnsqueezeGradKernel)
  FILL("gather", GatherKernel)
  FILL("gather_grad", GatherGradKernel)
  FILL("gather_nd", GatherNdKernel)
  FILL("gather_nd_grad", GatherNdGradKernel)
  FILL("take_along_axis", TakeAlongAxisKernel)
  FILL("take_along_axis_grad", TakeAlongAxisGradKernel)
  FILL("scatter", ScatterKernel)
  FILL("index_add", IndexAddKernel)
  FILL("abs", AbsKernel)
  FILL("max", MaxKernel)
  FILL("roll", RollKernel)
  FILL("rsqrt", RsqrtKernel)
  FILL("square", SquareKernel)
  FILL("pow", PowKernel)
  FILL("multiply", MultiplyKernel)
  FILL("multiply_grad", MultiplyGradKernel)
  FILL("subtract", SubtractKernel)
  FILL("subtract_grad", SubtractGradKernel)
  FILL("index_select", IndexSelectKernel)
  FILL("index_select_grad", IndexSelectGradKernel)
  FILL("squared_l2_norm", SquaredL2NormKernel)
  fill_messages("send_v2");
  fill_messages("recv_v2");
  auto& reshards = phi::distributed::GetReshardFunctionList();
  reshards.insert(reshards.begin(), std::make_unique<WidenedReshard>());
  return true;
}();

}  // namespace
