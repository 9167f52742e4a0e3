// What the CPU wheel of Paddle 3.3.1 lacks for several processes over Gloo.
//
// Called through front.cc in place of the wheel's stubs; loaded after Paddle. Built once per Paddle version by
// cpp_library.py, against the headers the wheel ships.
#include <dlfcn.h>

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "paddle/phi/api/include/tensor.h"
#include "paddle/phi/backends/cpu/cpu_context.h"
#include "paddle/phi/common/place.h"
#include "paddle/phi/core/dense_tensor.h"
#include "paddle/phi/core/distributed/auto_parallel/dist_attr.h"
#include "paddle/phi/core/distributed/comm_context.h"
#include "paddle/phi/core/distributed/comm_context_manager.h"
#include "paddle/pir/include/core/operation.h"
#include "paddle/utils/optional.h"

namespace phi {
namespace distributed {

// The members of the real class that are used here, declared again because its header needs Gloo's own headers,
// which the wheel does not ship; none of these is virtual.
class GlooCommContext final : public CommContext {
 public:
  void AllGather(DenseTensor*, const DenseTensor&, uint32_t);
  void AllReduce(DenseTensor*, const DenseTensor&, int, uint32_t);
  void Send(const DenseTensor&, int, uint32_t);
  void Recv(DenseTensor*, int, uint32_t);
};

// Cross-mesh reshard: the wheel's version indexes an empty list of custom devices and crashes.
Place GetDefaultPlace() { return CPUPlace(); }

}  // namespace distributed

static distributed::GlooCommContext* Comm(const CPUContext& context) {
  return static_cast<distributed::GlooCommContext*>(context.GetCommContext());
}

// [ndim, dims...] sent ahead of a tensor whose shape the receiver does not know
static constexpr int kHeaderSize = 10;

static void FillHeader(const DenseTensor& x, int64_t* header) {
  std::memset(header, 0, kHeaderSize * sizeof(int64_t));
  header[0] = x.dims().size();
  for (int i = 0; i < header[0]; ++i) header[i + 1] = x.dims()[i];
}

// The stubs throw "not compiled with NCCL or BKCL". Gloo has no reduce-scatter or all-to-all of its own here, so both
// are built from its all-reduce and all-gather: more traffic, the same values.
template <typename T, typename C>
void ReduceScatterKernel(const C& context, const DenseTensor& x, int nranks, DenseTensor* out) {
  auto* comm = Comm(context);
  DenseTensor sum;
  sum.Resize(x.dims());
  context.template Alloc<T>(&sum);
  comm->AllReduce(&sum, x, 0 /* sum */, 0);
  auto dims = x.dims();
  dims[0] /= nranks;
  out->Resize(dims);
  T* values = context.template Alloc<T>(out);
  std::memcpy(values, sum.data<T>() + out->numel() * comm->GetRank(), out->numel() * sizeof(T));
}

template <typename T, typename C>
void AllToAllKernel(const C& context, const DenseTensor& x, DenseTensor* out) {
  auto* comm = Comm(context);
  const int size = comm->GetSize(), rank = comm->GetRank();
  DenseTensor all;
  auto dims = x.dims();
  dims[0] *= size;
  all.Resize(dims);
  context.template Alloc<T>(&all);
  comm->AllGather(&all, x, 0);
  out->Resize(x.dims());
  T* values = context.template Alloc<T>(out);
  const int64_t block = x.numel() / size;
  for (int i = 0; i < size; ++i) {
    std::memcpy(values + i * block, all.data<T>() + i * x.numel() + rank * block, block * sizeof(T));
  }
}

template <typename T, typename C>
void PSendKernel(const C& context, const DenseTensor& x, int peer, bool dynamic_shape) {
  auto* comm = Comm(context);
  if (dynamic_shape) {
    DenseTensor header;
    header.Resize({kHeaderSize});
    FillHeader(x, context.template Alloc<int64_t>(&header));
    comm->Send(header, peer, 0);
  }
  comm->Send(x, peer, 0);
}

template <typename T, typename C>
void PRecvKernel(const C& context, int peer, DataType dtype, const std::vector<int>& out_shape, bool dynamic_shape,
                 DenseTensor* out) {
  auto* comm = Comm(context);
  if (dynamic_shape) {
    DenseTensor header;
    header.Resize({kHeaderSize});
    int64_t* values = context.template Alloc<int64_t>(&header);
    comm->Recv(&header, peer, 0);
    out->Resize(make_ddim(std::vector<int64_t>(values + 1, values + 1 + values[0])));
  } else if (!out_shape.empty()) {
    out->Resize(make_ddim(out_shape));
  }
  context.template Alloc<T>(out);
  comm->Recv(out, peer, 0);
}

#include "types.h"

}  // namespace phi

namespace paddle {
namespace framework {

// Static programs: the executor gives all CPU collectives one shared device context, so the first group set would
// serve every ring. Here each ring gets its own context.
phi::DeviceContext* ParseDeviceContext(pir::Operation* op, phi::DeviceContext* origin, const phi::Place& place,
                                       const std::string& stream, int priority) {
  if (origin == nullptr || place.GetType() != phi::AllocationType::CPU) return origin;
  auto attribute = op->attributes().find("ring_id");
  if (attribute == op->attributes().end()) return origin;
  static auto read_int = [] {  // pir::Int32Attribute::data() const, in libpaddle.so, which Python loads privately
    void* library = dlopen(LIBPADDLE, RTLD_LAZY | RTLD_NOLOAD);
    return reinterpret_cast<int (*)(const void*)>(dlsym(library, "_ZNK3pir14Int32Attribute4dataEv"));
  }();
  const std::string ring = std::to_string(read_int(&attribute->second));
  auto& manager = phi::distributed::CommContextManager::GetInstance();
  if (!manager.Has(ring)) return origin;
  static std::map<std::string, phi::CPUContext*> contexts;  // live for the whole process
  auto*& context = contexts[ring];
  if (context == nullptr) {
    context = new phi::CPUContext(place);
    context->SetAllocator(&origin->GetAllocator());
    context->SetHostAllocator(&origin->GetHostAllocator());
    context->SetZeroAllocator(&origin->GetZeroAllocator());
    context->SetHostZeroAllocator(&origin->GetHostZeroAllocator());
    context->SetGenerator(origin->GetGenerator());
    context->SetHostGenerator(origin->GetHostGenerator());
    context->SetCommContext(manager.Get(ring));
  }
  return context;
}

}  // namespace framework
}  // namespace paddle

// dist.reshard waits for the other ranks while holding the GIL, unlike every other op. The threads that send a
// pipeline's messages block meanwhile, and so does the rank that waits for a message: a deadlock.
extern "C" {
int PyGILState_Check();
void* PyEval_SaveThread();
void PyEval_RestoreThread(void*);
}

// front.cc relies only on how these types are passed
static_assert(std::is_trivially_copyable_v<phi::Place> && sizeof(phi::Place) <= 2 * sizeof(long));
static_assert(sizeof(phi::Place) > sizeof(long));
static_assert(!std::is_trivially_copyable_v<paddle::Tensor> && !std::is_trivially_copyable_v<paddle::optional<paddle::Tensor*>>);
static_assert(!std::is_trivially_copyable_v<phi::distributed::TensorDistAttr>);

struct WithoutLock {
  void* state = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  ~WithoutLock() {
    if (state != nullptr) PyEval_RestoreThread(state);
  }
};

paddle::Tensor reshard_ad_function(const paddle::Tensor& x, const phi::distributed::TensorDistAttr attribute,
                                   paddle::optional<paddle::Tensor*> out) {
  static auto reshard = [] {
    void* library = dlopen(LIBPADDLE, RTLD_LAZY | RTLD_NOLOAD);
    return reinterpret_cast<decltype(&reshard_ad_function)>(dlsym(
        library, "_Z19reshard_ad_functionRKN6paddle6TensorEN3phi11distributed14TensorDistAttrENS_8optionalIPS0_EE"));
  }();
  WithoutLock scope;
  return reshard(x, attribute, out);
}
