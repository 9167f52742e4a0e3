#include "kernel_table.h"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <regex>

#include "arguments.h"
#include "paddle/phi/core/kernel_registry.h"

namespace custom_device {
namespace {

using phi::DenseTensor;

CallKernel call_kernel = nullptr;  // one device for each process

// Not taken over: they work on the host, read other memory than their arguments', or speak to other ranks.
const std::regex kLeft(
    "(feed|fetch.*|memcpy.*|c_.*|all_reduce|all_gather|all_to_all|reduce_scatter|reduce|broadcast|send_v2|recv_v2|"
    "p_(send|recv).*|partial_.*|mp_allreduce_sum|barrier|share_data|print.*|load.*|save.*|shadow.*|global_.*|"
    "distributed_.*|sync_.*|strings_.*|.*_sr|.*_coo|.*_csr|comm_init_all|shape|shape64|numel|data|check_numerics)");

const std::regex kReadsShapesOnly("(full|zeros|ones|empty|randint|uniform|gaussian)_like.*|full_batch_size_like.*");

Inputs dense(const Kernel& kernel, const std::vector<const phi::TensorBase*>& tensors) {
  Inputs found;
  for (auto* tensor : tensors) {
    if (!DenseTensor::classof(tensor)) {
      PADDLE_THROW(common::errors::Unimplemented("kernel %s: this device has dense tensors only", kernel.name));
    }
    found.push_back(static_cast<const DenseTensor*>(tensor));
  }
  return found;
}

// What Paddle calls with C++ arguments: the context, inputs, attributes, outputs.
void call_with(const Kernel& kernel, Arguments arguments) {
  const auto& device = *arguments.next<const phi::CustomContext*>();
  std::vector<Inputs> inputs;
  for (auto kind : kernel.inputs) {
    const void* each = arguments.next<const void*>();
    switch (kind) {
      case Kind::one:
        inputs.push_back({static_cast<const DenseTensor*>(each)});
        break;
      case Kind::many:
        inputs.push_back(*static_cast<const Inputs*>(each));
        break;
      case Kind::many_of_any:
        inputs.push_back(dense(kernel, *static_cast<const std::vector<const phi::TensorBase*>*>(each)));
        break;
      case Kind::maybe: {
        const auto& found = *static_cast<const paddle::optional<DenseTensor>*>(each);
        inputs.push_back(found ? Inputs{found.get_ptr()} : Inputs{});
        break;
      }
      case Kind::maybe_many: {
        const auto& found = *static_cast<const paddle::optional<Inputs>*>(each);
        inputs.push_back(found ? *found : Inputs{});
      }
    }
  }
  std::vector<phi::Attribute> attributes;
  using Type = phi::AttributeType;
  for (auto& definition : kernel.cpu.args_def().attribute_defs()) {
    switch (definition.type_index) {
#define VALUE(type, ctype)                             \
  case Type::type:                                     \
    attributes.emplace_back(arguments.next<ctype>()); \
    break;
#define FLOATING(type, ctype)                                \
  case Type::type:                                           \
    attributes.emplace_back(arguments.next_float<ctype>()); \
    break;
#define OBJECT(type, ctype)                                    \
  case Type::type:                                             \
    attributes.emplace_back(*arguments.next<const ctype*>()); \
    break;
      VALUE(BOOL, bool)
      VALUE(INT32, int)
      VALUE(INT64, int64_t)
      VALUE(DATA_TYPE, phi::DataType)
      VALUE(DATA_LAYOUT, phi::DataLayout)
      FLOATING(FLOAT32, float)
      FLOATING(FLOAT64, double)
      OBJECT(STRING, std::string)
      OBJECT(BOOLS, std::vector<bool>)
      OBJECT(INT32S, std::vector<int>)
      OBJECT(INT64S, std::vector<int64_t>)
      OBJECT(FLOAT32S, std::vector<float>)
      OBJECT(FLOAT64S, std::vector<double>)
      OBJECT(STRINGS, std::vector<std::string>)
      OBJECT(SCALAR, phi::Scalar)
      OBJECT(SCALARS, std::vector<phi::Scalar>)
      OBJECT(INT_ARRAY, phi::IntArray)
      OBJECT(PLACE, phi::Place)
#undef VALUE
#undef FLOATING
#undef OBJECT
      default:
        std::fprintf(stderr, "kernel %s has an attribute of an unknown type\n", kernel.name.c_str());
        std::abort();
    }
  }
  std::vector<Outputs> outputs;
  for (auto kind : kernel.outputs) {
    void* each = const_cast<void*>(arguments.next<const void*>());
    outputs.push_back(kind == Kind::many ? *static_cast<Outputs*>(each) : Outputs{static_cast<DenseTensor*>(each)});
  }
  (*call_kernel)(kernel, device, inputs, outputs, attributes);
}

// What Paddle calls with a KernelContext: programs, and the few operators that are always called so.
void call_with(const Kernel& kernel, phi::KernelContext& context) {
  std::vector<Inputs> inputs;
  for (size_t i = 0; i < kernel.inputs.size(); ++i) {
    const auto [first, last] = context.InputRangeAt(i);
    Inputs each;
    for (int j = first; j < last; ++j) each.push_back(static_cast<const DenseTensor*>(context.MutableInputAt(j)));
    if (!is_list(kernel.inputs[i], false) && each.size() == 1 && !each[0]) each.clear();
    inputs.push_back(each);
  }
  std::vector<phi::Attribute> attributes;
  for (size_t i = 0; i < context.AttrsSize(); ++i) {
    auto attribute = context.AttrAt(i);
    const bool is_array = kernel.cpu.args_def().attribute_defs()[i].type_index == phi::AttributeType::INT_ARRAY;
    if (auto* tensor = paddle::get_if<phi::TensorRef>(&attribute)) {
      attribute = is_array ? phi::Attribute(phi::IntArray(*tensor->Get())) : phi::Attribute(phi::Scalar(*tensor->Get()));
    } else if (auto* tensors = paddle::get_if<std::vector<phi::TensorRef>>(&attribute)) {
      attribute = phi::IntArray(*tensors);
    }
    attributes.push_back(attribute);
  }
  std::vector<Outputs> outputs;
  for (size_t i = 0; i < kernel.outputs.size(); ++i) {
    const auto [first, last] = context.OutputRangeAt(i);
    Outputs each;
    for (int j = first; j < last; ++j) each.push_back(static_cast<DenseTensor*>(context.MutableOutputAt(j)));
    outputs.push_back(each);
  }
  (*call_kernel)(kernel, context.GetDeviceContext<phi::CustomContext>(), inputs, outputs, attributes);
}

template <typename Definitions>
bool find_kinds(const Definitions& definitions, std::vector<Kind>* kinds) {
  for (auto& definition : definitions) {
    const auto type = definition.type_index;
    if (type == typeid(DenseTensor) || type == typeid(const DenseTensor&) || type == typeid(DenseTensor*)) {
      kinds->push_back(Kind::one);
    } else if (type == typeid(const paddle::optional<DenseTensor>&)) {
      kinds->push_back(Kind::maybe);
    } else if (type == typeid(const Inputs&) || type == typeid(Outputs)) {
      kinds->push_back(Kind::many);
    } else if (type == typeid(const std::vector<const phi::TensorBase*>&)) {
      kinds->push_back(Kind::many_of_any);
    } else if (type == typeid(const paddle::optional<Inputs>&)) {
      kinds->push_back(Kind::maybe_many);
    } else {
      return false;  // sparse tensors, lists of lists
    }
  }
  return true;
}

struct Found {
  phi::DataType type;
  phi::Kernel kernel;
  bool widens;
};

// The CPU's kernels of an operator, and float32's for the 16-bit types that have none.
std::vector<Found> cpu_kernels(const phi::KernelKeyMap& kernels) {
  std::vector<Found> found;
  for (auto& [key, kernel] : kernels) {
    const bool is_dense = key.layout() != phi::DataLayout::STRIDED;
    if (key.backend() == phi::Backend::CPU && is_dense) found.push_back({key.dtype(), kernel, false});
  }
  const auto plain = found;
  for (auto type : {phi::DataType::BFLOAT16, phi::DataType::FLOAT16}) {
    const Found* wide = nullptr;
    bool is_there = false;
    for (auto& each : plain) {
      is_there |= each.type == type;
      if (each.type == phi::DataType::FLOAT32) wide = &each;
    }
    if (wide && !is_there) found.push_back({type, wide->kernel, true});
  }
  return found;
}

template <typename Definitions>
void move_to(phi::Backend backend, phi::DataType type, bool widens, Definitions* definitions) {
  for (auto& each : *definitions) {
    if (each.backend == phi::Backend::CPU) each.SetBackend(backend);
    if (widens && each.dtype == phi::DataType::FLOAT32) each.SetDataType(type);
  }
}

// As long as the process.
phi::Kernel make_kernel(const Kernel* kernel) {
  return phi::Kernel([kernel](phi::KernelContext* context) { call_with(*kernel, *context); }, make_stub(kernel));
}

void take_over(const std::string& name, phi::Backend backend, phi::KernelKeyMap* kernels, bool (*prepare)(Kernel*)) {
  for (auto& found : cpu_kernels(*kernels)) {
    const phi::KernelKey key(backend, phi::DataLayout::ALL_LAYOUT, found.type);
    if (kernels->count(key) || !found.kernel.GetVariadicKernelFn<void*>()) continue;
    Kernel kernel{name, found.kernel, found.type, found.widens};
    kernel.reads_shapes_only = std::regex_match(name, kReadsShapesOnly);
    if (!find_kinds(found.kernel.args_def().input_defs(), &kernel.inputs) ||
        !find_kinds(found.kernel.args_def().output_defs(), &kernel.outputs)) {
      continue;
    }
    if (!prepare(&kernel)) continue;
    auto made = make_kernel(new Kernel(kernel));
    *made.mutable_args_def() = found.kernel.args_def();
    move_to(backend, found.type, found.widens, &made.mutable_args_def()->input_defs());
    if (kernel.takes_host_inputs) {
      for (auto& input : made.mutable_args_def()->input_defs()) input.SetBackend(phi::Backend::ALL_BACKEND);
    }
    move_to(backend, found.type, found.widens, &made.mutable_args_def()->output_defs());
    kernels->emplace(key, made);
  }
}

void append_attribute(char letter, phi::KernelArgsDef* arguments) {
  using Type = phi::AttributeType;
  static const std::map<char, Type> types = {{'b', Type::BOOL},    {'i', Type::INT32},  {'l', Type::INT64}, {'f', Type::FLOAT32},
                                             {'d', Type::FLOAT64}, {'s', Type::STRING}, {'L', Type::INT64S}};
  arguments->AppendAttribute(types.at(letter));
}

}  // namespace

void take_over_cpu_kernels(const std::string& device_type, CallKernel call, bool (*prepare)(Kernel*)) {
  call_kernel = call;
  const auto backend = paddle::experimental::StringToBackend(device_type.c_str());
  auto& all = phi::KernelFactory::Instance().kernels();
  // Paddle 3.3.1's own, for the first use of a ring in a program, takes a communicator that nobody has set: it crashes
  phi::Kernel nothing([](phi::KernelContext*) {}, nullptr);
  all["barrier"].emplace(phi::KernelKey(backend, phi::DataLayout::ALL_LAYOUT, phi::DataType::INT32), nothing);
  for (auto& [name, kernels] : all) {
    if (!std::regex_match(name, kLeft)) take_over(name, backend, &kernels, prepare);
  }
}

void add_kernel(const std::string& device_type, const std::string& name, const std::string& signature,
                phi::DataType type, CallKernel call) {
  call_kernel = call;
  const auto backend = paddle::experimental::StringToBackend(device_type.c_str());
  const auto layout = phi::DataLayout::ALL_LAYOUT;
  const phi::KernelKey key(backend, layout, type);
  auto& kernels = phi::KernelFactory::Instance().kernels()[name];
  if (kernels.count(key)) return;
  auto* kernel = new Kernel{name, phi::Kernel(), type, false};
  kernel->is_on_cpu = false;
  auto* arguments = kernel->cpu.mutable_args_def();
  bool is_output = false;
  for (char letter : signature) {
    const auto kind = letter == 't' ? Kind::one : letter == 'o' ? Kind::maybe : Kind::many;
    if (letter == '>') {
      is_output = true;
    } else if (letter != 't' && letter != 'o' && letter != 'T') {
      append_attribute(letter, arguments);
    } else if (is_output) {
      arguments->AppendOutput(backend, layout, phi::DataType::UNDEFINED, typeid(DenseTensor*));
      kernel->outputs.push_back(kind);
    } else {
      arguments->AppendInput(backend, layout, phi::DataType::UNDEFINED,
                             letter == 't' ? typeid(const DenseTensor&) : typeid(const paddle::optional<DenseTensor>&));
      kernel->inputs.push_back(kind);
    }
  }
  auto made = make_kernel(kernel);
  *made.mutable_args_def() = *arguments;
  kernels.emplace(key, made);
}

void seal_kernels() { seal_stubs(); }

}  // namespace custom_device

extern "C" void run_with_arguments(const void* kernel, const uint64_t* integers, const uint64_t* floats,
                                   const uint64_t* stack) {
  using namespace custom_device;
  call_with(*static_cast<const Kernel*>(kernel), Arguments(integers, floats, stack));
}
