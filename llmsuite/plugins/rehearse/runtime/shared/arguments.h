// The way from a call with C++ arguments, of types that are known only when the process runs, to one function.
//
// In dygraph Paddle casts the address of a kernel to a function type and calls it. For each kernel of the device there
// is a stub: it notes which kernel it is, and goes on to code that keeps all registers with arguments and calls
// `run_with_arguments` (kernel_table.cc). For x86-64, with the calling convention of System V.
#pragma once
#include <cstddef>
#include <cstdint>

namespace custom_device {

// Takes arguments one after the other.
class Arguments {
 public:
  Arguments(const uint64_t* integers, const uint64_t* floats, const uint64_t* stack)
      : integers_(integers), floats_(floats), stack_(stack) {}

  template <typename T>
  const T& next() {  // an integer, an enum, a bool or a pointer
    return *reinterpret_cast<const T*>(num_integers_ < 6 ? integers_ + num_integers_++ : stack_++);
  }

  template <typename T>
  const T& next_float() {
    return *reinterpret_cast<const T*>(num_floats_ < 8 ? floats_ + num_floats_++ : stack_++);
  }

 private:
  const uint64_t *integers_, *floats_, *stack_;
  int num_integers_ = 0, num_floats_ = 0;
};

// The address of a stub. `kernel` is what `run_with_arguments` gets.
void* make_stub(const void* kernel);
void seal_stubs();  // makes those that there are executable; before the first call

}  // namespace custom_device

// Defined in kernel_table.cc. Throws what the kernel does; the stub lets it pass.
extern "C" __attribute__((visibility("hidden"))) void run_with_arguments(const void* kernel, const uint64_t* integers,
                                                                         const uint64_t* floats, const uint64_t* stack);
