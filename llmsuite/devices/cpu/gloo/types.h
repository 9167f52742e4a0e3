// Element types that kernels are instantiated for; included inside namespace phi, after the templates.
#define LLMSUITE_KERNELS(T)                                                                                   \
  template void ReduceScatterKernel<T, CPUContext>(const CPUContext&, const DenseTensor&, int, DenseTensor*); \
  template void AllToAllKernel<T, CPUContext>(const CPUContext&, const DenseTensor&, DenseTensor*);           \
  template void PSendKernel<T, CPUContext>(const CPUContext&, const DenseTensor&, int, bool);                 \
  template void PRecvKernel<T, CPUContext>(const CPUContext&, int, DataType, const std::vector<int>&, bool, DenseTensor*);
LLMSUITE_KERNELS(float)
LLMSUITE_KERNELS(double)
LLMSUITE_KERNELS(int)
LLMSUITE_KERNELS(int64_t)
LLMSUITE_KERNELS(bool)
LLMSUITE_KERNELS(uint8_t)
LLMSUITE_KERNELS(int8_t)
LLMSUITE_KERNELS(int16_t)
LLMSUITE_KERNELS(dtype::float16)
LLMSUITE_KERNELS(dtype::bfloat16)
