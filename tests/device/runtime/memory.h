// Device memory: allocated by Paddle's allocators, never touched by the host.
//
// The memory is mapped twice. Paddle and Python get addresses of the outer view, which has no access rights: a host that
// reads or writes there ends with SIGSEGV, as with the memory of a GPU. What runs on a stream uses the inner view.
#pragma once
#include <cstddef>
#include <cstdint>

namespace sim {

void* allocate(size_t size);  // null where nothing is left
void release(void* address, size_t size);

bool is_device(const void* address);
void* inner(const void* address);  // the address that a stream may use; host addresses stay as they are

void poison(void* inner_address, size_t size);  // NaN in every floating point type, unless SIM_POISON=0

struct MemoryFigures {
  uint64_t total, used, peak, allocations, releases;
};
MemoryFigures memory_figures();

}  // namespace sim
