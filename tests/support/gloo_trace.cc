// Records every message of Paddle's distributed tensors over Gloo: operation and shape, whatever caused it.
//
// Implicit reshards happen inside Paddle's C++ operators, where Python sees nothing; all of them end in these members.
// One line per message: operation, communicator, bytes per element, dims.
// Loaded with RTLD_GLOBAL before `import paddle`, they take precedence and call the real ones. Links nothing of Paddle:
// see front.cc.
#include <dlfcn.h>

#include <mutex>
#include <string>

#include "paddle/phi/core/dense_tensor.h"
#include "paddle/phi/core/distributed/comm_context.h"

static std::mutex mutex;
static std::string lines;
static bool active = false;

static void Note(const char* what, const void* communicator, const phi::DenseTensor& x) {
  std::lock_guard<std::mutex> guard(mutex);
  if (!active) return;
  lines += what;
  lines += " " + std::to_string(reinterpret_cast<uintptr_t>(communicator));
  lines += " " + std::to_string(phi::SizeOf(x.dtype()));
  for (int i = 0; i < x.dims().size(); ++i) lines += " " + std::to_string(x.dims()[i]);
  lines += "\n";
}

extern "C" void trace_start() {
  std::lock_guard<std::mutex> guard(mutex);
  lines.clear();
  active = true;
}

extern "C" const char* trace_stop() {  // valid until the next start
  std::lock_guard<std::mutex> guard(mutex);
  active = false;
  return lines.c_str();
}

template <typename F>
static F Real(const char* symbol) {
  void* library = dlopen("libphi_core.so", RTLD_LAZY | RTLD_NOLOAD);
  return reinterpret_cast<F>(dlsym(library, symbol));
}

namespace phi {
namespace distributed {

class GlooCommContext final : public CommContext {
 public:
  void AllGather(DenseTensor*, const DenseTensor&, uint32_t);
  void AllReduce(DenseTensor*, const DenseTensor&, int, uint32_t);
  void Broadcast(DenseTensor*, const DenseTensor&, int, uint32_t);
  void Reduce(DenseTensor*, const DenseTensor&, int, int, uint32_t);
  void Send(const DenseTensor&, int, uint32_t);
};

using Self = GlooCommContext*;

void GlooCommContext::AllGather(DenseTensor* out, const DenseTensor& in, uint32_t tag) {
  Note("all_gather", this, in);
  static auto real = Real<void (*)(Self, DenseTensor*, const DenseTensor&, uint32_t)>(
      "_ZN3phi11distributed15GlooCommContext9AllGatherEPNS_11DenseTensorERKS2_j");
  real(this, out, in, tag);
}

void GlooCommContext::AllReduce(DenseTensor* out, const DenseTensor& in, int type, uint32_t tag) {
  Note("all_reduce", this, in);
  static auto real = Real<void (*)(Self, DenseTensor*, const DenseTensor&, int, uint32_t)>(
      "_ZN3phi11distributed15GlooCommContext9AllReduceEPNS_11DenseTensorERKS2_ij");
  real(this, out, in, type, tag);
}

void GlooCommContext::Broadcast(DenseTensor* out, const DenseTensor& in, int root, uint32_t tag) {
  Note("broadcast", this, in);
  static auto real = Real<void (*)(Self, DenseTensor*, const DenseTensor&, int, uint32_t)>(
      "_ZN3phi11distributed15GlooCommContext9BroadcastEPNS_11DenseTensorERKS2_ij");
  real(this, out, in, root, tag);
}

void GlooCommContext::Reduce(DenseTensor* out, const DenseTensor& in, int type, int root, uint32_t tag) {
  Note("reduce", this, in);
  static auto real = Real<void (*)(Self, DenseTensor*, const DenseTensor&, int, int, uint32_t)>(
      "_ZN3phi11distributed15GlooCommContext6ReduceEPNS_11DenseTensorERKS2_iij");
  real(this, out, in, type, root, tag);
}

void GlooCommContext::Send(const DenseTensor& in, int peer, uint32_t tag) {
  Note("send", this, in);
  static auto real = Real<void (*)(Self, const DenseTensor&, int, uint32_t)>(
      "_ZN3phi11distributed15GlooCommContext4SendERKNS_11DenseTensorEij");
  real(this, in, peer, tag);
}

}  // namespace distributed
}  // namespace phi
