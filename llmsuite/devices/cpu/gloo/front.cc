// Symbols that replace the wheel's by interposition: this library is loaded with RTLD_GLOBAL before `import paddle` and
// forwards each call to kernels.cc, which is loaded after it.
//
// Neither file may pull Paddle's own libraries into the global scope. libphi_core.so of Paddle 3.3.1 has copies of
// inline functions that need AVX-512; libpaddle.so has its own, for any x86-64, and those are found first as long as
// neither library is global. So this file links no library of Paddle and includes none of its headers.
#include <dlfcn.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace pir {
class Operation;
}
namespace phi {
class CPUContext;
class DenseTensor;
class DeviceContext;
class KernelContext;
class Place;
enum class DataType;
namespace dtype {
struct float16;
struct bfloat16;
}  // namespace dtype
}  // namespace phi

static void* kernels = nullptr;

extern "C" void use_kernels(void* library) { kernels = library; }

// The address in kernels.cc of the function that this file forwards to.
template <typename F>
static F* Real(F* front) {
  Dl_info own;
  dladdr(reinterpret_cast<void*>(front), &own);
  void* real = kernels == nullptr ? nullptr : dlsym(kernels, own.dli_sname);
  if (real == nullptr) {
    std::fprintf(stderr, "llmsuite: %s is called before the CPU kernels for several processes are loaded\n", own.dli_sname);
    std::abort();
  }
  return reinterpret_cast<F*>(real);
}

namespace phi {

template <typename T, typename C>
void ReduceScatterKernel(const C& context, const DenseTensor& x, int nranks, DenseTensor* out) {
  static auto* real = Real(&ReduceScatterKernel<T, C>);
  real(context, x, nranks, out);
}

template <typename T, typename C>
void AllToAllKernel(const C& context, const DenseTensor& x, DenseTensor* out) {
  static auto* real = Real(&AllToAllKernel<T, C>);
  real(context, x, out);
}

template <typename T, typename C>
void PSendKernel(const C& context, const DenseTensor& x, int peer, bool dynamic_shape) {
  static auto* real = Real(&PSendKernel<T, C>);
  real(context, x, peer, dynamic_shape);
}

template <typename T, typename C>
void PRecvKernel(const C& context, int peer, DataType dtype, const std::vector<int>& out_shape, bool dynamic_shape,
                 DenseTensor* out) {
  static auto* real = Real(&PRecvKernel<T, C>);
  real(context, peer, dtype, out_shape, dynamic_shape, out);
}

#include "types.h"

}  // namespace phi

namespace paddle {
namespace operators {
template <typename T, typename C>
class SendOpV2CPUKernel;
template <typename T, typename C>
class RecvOpV2CPUKernel;
}  // namespace operators

namespace framework {

phi::DeviceContext* ParseDeviceContext(pir::Operation* op, phi::DeviceContext* origin, const phi::Place& place,
                                       const std::string& stream, int priority) {
  static auto* real = Real(&ParseDeviceContext);
  return real(op, origin, place, stream, priority);
}

#include "messages.h"

template <typename T>
void StructKernelImpl<operators::SendOpV2CPUKernel<T, phi::CPUContext>, void>::Compute(phi::KernelContext* context) {
  static auto* real = Real(&StructKernelImpl<operators::SendOpV2CPUKernel<T, phi::CPUContext>, void>::Compute);
  real(context);
}

template <typename T>
void StructKernelImpl<operators::RecvOpV2CPUKernel<T, phi::CPUContext>, void>::Compute(phi::KernelContext* context) {
  static auto* real = Real(&StructKernelImpl<operators::RecvOpV2CPUKernel<T, phi::CPUContext>, void>::Compute);
  real(context);
}

LLMSUITE_MESSAGES(float)
LLMSUITE_MESSAGES(int64_t)

}  // namespace framework
}  // namespace paddle

// The C++ ABI passes a class with a destructor by address, whatever its members, and a trivial one of two words in
// registers (kernels.cc asserts which is which).
struct Returned {
  ~Returned() {}
};
struct TwoWords {
  long words[2];
};

// Gloo gives up after 30 s by default, long before launch.stall_seconds: the rank that waits would fail, and be blamed
// for the one it waits for. Nothing in Paddle sets another limit, so each context is made with one here. The launcher
// says which; others get 30 minutes.
void Context(void* self, int rank, int size, int base) asm("_ZN4gloo7ContextC2Eiii");
void Context(void* self, int rank, int size, int base) {
  static auto* real = Real(&Context);
  static auto* set_timeout = reinterpret_cast<void (*)(void*, std::chrono::milliseconds)>(
      dlsym(kernels, "_ZN4gloo7Context10setTimeoutENSt6chrono8durationIlSt5ratioILl1ELl1000EEEE"));
  static const char* seconds = std::getenv("LLMSUITE_GLOO_TIMEOUT_S");
  real(self, rank, size, base);
  set_timeout(self, std::chrono::seconds(seconds ? std::atoll(seconds) : 1800));
}

TwoWords GetDefaultPlace() asm("_ZN3phi11distributed15GetDefaultPlaceEv");
TwoWords GetDefaultPlace() {
  static auto* real = Real(&GetDefaultPlace);
  return real();
}

Returned Reshard(const void* x, const void* attribute, const void* out) asm(
    "_Z19reshard_ad_functionRKN6paddle6TensorEN3phi11distributed14TensorDistAttrENS_8optionalIPS0_EE");
Returned Reshard(const void* x, const void* attribute, const void* out) {
  static auto* real = Real(&Reshard);
  return real(x, attribute, out);
}
