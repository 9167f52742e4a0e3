// Kernels of the messages between pipeline stages in static programs, `send_v2` and `recv_v2`. The wheel has classes of
// these names, whose `Compute` throws. Included inside namespace paddle::framework.
template <typename K, typename E = void>
struct StructKernelImpl;

template <typename T>
struct StructKernelImpl<operators::SendOpV2CPUKernel<T, phi::CPUContext>, void> {
  static void Compute(phi::KernelContext* context);
};

template <typename T>
struct StructKernelImpl<operators::RecvOpV2CPUKernel<T, phi::CPUContext>, void> {
  static void Compute(phi::KernelContext* context);
};

// Element types that travel: activations, and where documents begin.
#define LLMSUITE_MESSAGES(T)                                                               \
  template struct StructKernelImpl<operators::SendOpV2CPUKernel<T, phi::CPUContext>, void>; \
  template struct StructKernelImpl<operators::RecvOpV2CPUKernel<T, phi::CPUContext>, void>;
