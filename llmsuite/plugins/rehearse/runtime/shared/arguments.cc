#include "arguments.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

// r10 holds the kernel. What is pushed: 6 integer registers, then 8 of floating point, of which the lowest 8 bytes.
asm(R"(
  .text
  .p2align 4
  .local custom_device_take_arguments
  .type custom_device_take_arguments, @function
custom_device_take_arguments:
  .cfi_startproc
  pushq %rbp
  .cfi_def_cfa_offset 16
  .cfi_offset %rbp, -16
  movq %rsp, %rbp
  .cfi_def_cfa_register %rbp
  subq $112, %rsp
  movq %rdi, 0(%rsp)
  movq %rsi, 8(%rsp)
  movq %rdx, 16(%rsp)
  movq %rcx, 24(%rsp)
  movq %r8, 32(%rsp)
  movq %r9, 40(%rsp)
  movsd %xmm0, 48(%rsp)
  movsd %xmm1, 56(%rsp)
  movsd %xmm2, 64(%rsp)
  movsd %xmm3, 72(%rsp)
  movsd %xmm4, 80(%rsp)
  movsd %xmm5, 88(%rsp)
  movsd %xmm6, 96(%rsp)
  movsd %xmm7, 104(%rsp)
  movq %r10, %rdi
  movq %rsp, %rsi
  leaq 48(%rsp), %rdx
  leaq 16(%rbp), %rcx
  call run_with_arguments
  leave
  .cfi_def_cfa %rsp, 8
  ret
  .cfi_endproc
  .size custom_device_take_arguments, .-custom_device_take_arguments

  .globl custom_device_address_of_entry
  .hidden custom_device_address_of_entry
  .type custom_device_address_of_entry, @function
custom_device_address_of_entry:
  leaq custom_device_take_arguments(%rip), %rax
  ret
  .size custom_device_address_of_entry, .-custom_device_address_of_entry
)");

extern "C" __attribute__((visibility("hidden"))) void* custom_device_address_of_entry();

namespace custom_device {
namespace {

constexpr size_t kStub = 32, kBlock = size_t(1) << 18;
std::vector<char*> blocks;
size_t used = kBlock;

char* room() {
  if (used + kStub > kBlock) {
    void* block = mmap(nullptr, kBlock, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (block == MAP_FAILED) {
      std::perror("memory of stubs");
      std::abort();
    }
    blocks.push_back(static_cast<char*>(block));
    used = 0;
  }
  used += kStub;
  return blocks.back() + used - kStub;
}

char* put(char* at, std::initializer_list<unsigned char> bytes) {
  for (auto byte : bytes) *at++ = static_cast<char>(byte);
  return at;
}

char* put_address(char* at, const void* address) {
  std::memcpy(at, &address, sizeof(address));
  return at + sizeof(address);
}

}  // namespace

void* make_stub(const void* kernel) {
  char* stub = room();
  char* at = put(stub, {0x49, 0xBA});  // mov r10, kernel
  at = put_address(at, kernel);
  at = put(at, {0x49, 0xBB});  // mov r11, entry
  at = put_address(at, custom_device_address_of_entry());
  put(at, {0x41, 0xFF, 0xE3});  // jmp r11
  return stub;
}

void seal_stubs() {
  for (char* block : blocks) {
    if (mprotect(block, kBlock, PROT_READ | PROT_EXEC) != 0) {
      std::perror("memory of stubs");
      std::abort();
    }
  }
}

}  // namespace custom_device
