// Messages between the pipeline stages of a static program over Gloo. Called through front.cc, as kernels.cc.
#include <dlfcn.h>

#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

#include "paddle/phi/backends/context_pool.h"
#include "paddle/phi/backends/cpu/cpu_context.h"
#include "paddle/phi/common/place.h"
#include "paddle/phi/core/dense_tensor.h"
#include "paddle/phi/core/distributed/comm_context.h"
#include "paddle/phi/core/distributed/comm_context_manager.h"
#include "paddle/phi/core/kernel_context.h"

namespace phi {
namespace distributed {

// See kernels.cc.
class GlooCommContext final : public CommContext {
 public:
  void Send(const DenseTensor&, int, uint32_t);
  void Recv(DenseTensor*, int, uint32_t);
};

}  // namespace distributed
}  // namespace phi

namespace paddle {
namespace framework {

class Variable;

// Only its base matters here, by which the compiler comes from one to the other.
class ExecutionContext : public phi::KernelContext {
 public:
  virtual ~ExecutionContext();
};

}  // namespace framework

namespace operators {

template <typename T, typename C>
class SendOpV2CPUKernel {};
template <typename T, typename C>
class RecvOpV2CPUKernel {};

}  // namespace operators
}  // namespace paddle

namespace {

using paddle::framework::ExecutionContext;
using paddle::framework::Variable;
using phi::distributed::GlooCommContext;

// A function of libpaddle.so, which Python loads privately.
template <typename F>
F* Find(const char* name) {
  static void* library = dlopen(LIBPADDLE, RTLD_LAZY | RTLD_NOLOAD);
  void* found = library == nullptr ? nullptr : dlsym(library, name);
  if (found == nullptr) throw std::runtime_error(std::string("llmsuite: Paddle has no ") + name);
  return reinterpret_cast<F*>(found);
}

int Attribute(const ExecutionContext* context, const char* name) {
  static auto* get = Find<const void*(const ExecutionContext*, const std::string&)>(
      "_ZNK6paddle9framework16ExecutionContext7GetAttrERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE");
  return *static_cast<const int*>(get(context, name));  // it is a variant, whose value lies first
}

phi::DenseTensor* Dense(const Variable* variable) {
  static auto* get = Find<phi::DenseTensor*(const Variable*)>(
      "_ZN6paddle9framework8Variable10GetMutableIN3phi11DenseTensorEEEPT_v");
  return get(variable);
}

phi::DenseTensor* Input(const ExecutionContext* context) {
  static auto* get = Find<const Variable*(const ExecutionContext*, const std::string&)>(
      "_ZNK6paddle9framework16ExecutionContext8InputVarERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE");
  return Dense(get(context, "X"));
}

phi::DenseTensor* Output(const ExecutionContext* context) {
  static auto* get = Find<const Variable*(const ExecutionContext*, const std::string&)>(
      "_ZNK6paddle9framework16ExecutionContext9OutputVarERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE");
  return Dense(get(context, "Out"));
}

const phi::CPUContext& Cpu() {
  return *static_cast<phi::CPUContext*>(phi::DeviceContextPool::Instance().Get(phi::CPUPlace()));
}

GlooCommContext* Ring(int ring) {
  auto& manager = phi::distributed::CommContextManager::GetInstance();
  const std::string key = std::to_string(ring);
  if (!manager.Has(key)) throw std::runtime_error("llmsuite: the ranks of ring " + key + " have not met");
  return static_cast<GlooCommContext*>(manager.Get(key));
}

// A message of Gloo's blocks until the other rank receives, and with 1F1B both ranks send at once. So each ring has a
// thread that sends copies in their order. A ring goes one way: [a, b] and [b, a] are two.
class Sender {
 public:
  static Sender& Of(int ring) {
    static std::mutex guard;
    static auto* all = new std::map<int, Sender*>;  // never destroyed, as its threads live as long as the process
    static const int once = std::atexit([] {        // the other rank still wants what was sent last
      for (auto& entry : *all) entry.second->Drain();
    });
    (void)once;
    std::lock_guard<std::mutex> held(guard);
    auto*& sender = (*all)[ring];
    if (sender == nullptr) sender = new Sender;
    return *sender;
  }

  // Raises the error of an earlier message.
  void Post(std::function<void()> message) {
    std::lock_guard<std::mutex> held(guard_);
    if (error_) std::rethrow_exception(error_);
    waiting_.push_back(std::move(message));
    changed_.notify_all();
  }

 private:
  Sender() {
    std::thread([this] { Loop(); }).detach();
  }

  void Drain() {
    std::unique_lock<std::mutex> held(guard_);
    changed_.wait(held, [this] { return error_ || (waiting_.empty() && !is_busy_); });
  }

  void Loop() {
    std::unique_lock<std::mutex> held(guard_);
    while (!error_) {
      changed_.wait(held, [this] { return !waiting_.empty(); });
      auto message = std::move(waiting_.front());
      waiting_.pop_front();
      is_busy_ = true;
      held.unlock();
      std::exception_ptr error;
      try {
        message();
      } catch (...) {
        error = std::current_exception();
      }
      message = nullptr;  // with its copy
      held.lock();
      is_busy_ = false;
      error_ = error;
      changed_.notify_all();
    }
  }

  std::mutex guard_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> waiting_;
  bool is_busy_ = false;
  std::exception_ptr error_;
};

}  // namespace

namespace paddle {
namespace framework {

#include "messages.h"

template <typename T>
void StructKernelImpl<operators::SendOpV2CPUKernel<T, phi::CPUContext>, void>::Compute(phi::KernelContext* kernel) {
  auto* context = static_cast<ExecutionContext*>(kernel);
  auto* x = Input(context);
  const int ring = Attribute(context, "ring_id"), peer = Attribute(context, "peer");
  auto copy = std::make_shared<phi::DenseTensor>();
  copy->Resize(x->dims());
  // by what the tensor says, not by T: where tests fill in kernels for 16 bits, they are these
  std::memcpy(Cpu().Alloc(copy.get(), x->dtype()), x->data(), x->numel() * phi::SizeOf(x->dtype()));
  auto* comm = Ring(ring);
  Sender::Of(ring).Post([=] { comm->Send(*copy, peer, 0); });
}

template <typename T>
void StructKernelImpl<operators::RecvOpV2CPUKernel<T, phi::CPUContext>, void>::Compute(phi::KernelContext* kernel) {
  auto* context = static_cast<ExecutionContext*>(kernel);
  auto* out = Output(context);  // its shape and dtype are known from the program
  Cpu().Alloc(out, out->dtype());
  Ring(Attribute(context, "ring_id"))->Recv(out, Attribute(context, "peer"), 0);
}

LLMSUITE_MESSAGES(float)
LLMSUITE_MESSAGES(int64_t)

}  // namespace framework
}  // namespace paddle
