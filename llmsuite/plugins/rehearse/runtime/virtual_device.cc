// The runtime that Paddle's CustomDevice interface asks for, of a device that does nothing: its memory is address space,
// of which only pages of small tensors are ever touched, and what is put on its streams is over at once. A second device
// is the pinned memory of the host, which is address space too.
#include <sys/mman.h>

#include <cstring>
#include <mutex>

#include "paddle/phi/core/enforce.h"
#include "paddle/phi/backends/device_ext.h"
#include "paddle/phi/core/memory/allocation/allocator.h"
#include "records.h"
#include "settings.h"
#include "virtual_collectives.h"
#include "virtual_kernels.h"
#include "virtual_reshard.h"

namespace rehearse {
namespace {

struct Event {
  int64_t number;
};

constexpr int kPinned = 1;
constexpr int kNumDevices = 2;

std::mutex memory_mutex;
size_t used[kNumDevices] = {}, most_used[kNumDevices] = {};
int current_device = 0;

size_t total() {
  static const size_t bytes = setting("LLMSUITE_REHEARSE_MEMORY", int64_t(1) << 50);
  return bytes;
}

Stream* stream_at(C_Stream stream) { return stream_of(reinterpret_cast<const void*>(stream)); }
Event* event_at(C_Event event) { return reinterpret_cast<Event*>(event); }

C_Status allocate(const C_Device device, void** address, size_t size) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  size_t& own = used[device->id];
  if (device->id != kPinned && own + size > total()) {
    // as Paddle's allocator of GPUs: memory that is kept for later tensors is given back before this is an error
    PADDLE_THROW_BAD_ALLOC(common::errors::ResourceExhausted(
        "Out of memory: a rank may take %d bytes, has taken %d, and needs %d more", total(), own, size));
  }
  *address = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*address == MAP_FAILED) return C_FAILED;
  madvise(*address, size, MADV_NOHUGEPAGE);  // a small tensor would touch 2 MiB
  own += size;
  most_used[device->id] = std::max(most_used[device->id], own);
  return C_SUCCESS;
}

C_Status release(const C_Device device, void* address, size_t size) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  used[device->id] -= size;
  return munmap(address, size) == 0 ? C_SUCCESS : C_FAILED;
}

C_Status move(What what, C_Stream stream, void* to, const void* from, size_t size) {
  static const char* names[] = {"", "", "upload", "read", "copy"};
  if (size <= kSmall) {
    std::memmove(to, from, size);
  } else if (what == What::read) {
    std::memset(to, 0, size);
  }
  Work work;
  work.bytes = what == What::copy ? 2.0 * size : size;
  note(what, stream_at(stream), names[static_cast<int>(what)], work);
  return C_SUCCESS;
}

C_Status wait(const char* name, C_Stream stream, int64_t about) {
  Work work;
  work.about = about;
  note(What::wait, stream_at(stream), name, work);
  return C_SUCCESS;
}

// A copy between the device and the pinned memory of the host, or within one of them. Only small tensors have values.
C_Status move_between(const C_Device to_device, const C_Device from_device, C_Stream stream, void* to, const void* from,
                      size_t size) {
  if (to_device->id == from_device->id) return move(What::copy, stream, to, from, size);
  if (size <= kSmall) std::memmove(to, from, size);
  Work work;
  work.bytes = size;
  const bool is_read = to_device->id == kPinned;
  note(is_read ? What::read : What::upload, stream_at(stream), is_read ? "read" : "upload", work);
  return C_SUCCESS;
}

// A copy that the host waits for.
C_Status move_now(What what, void* to, const void* from, size_t size) {
  move(what, nullptr, to, from, size);
  return wait("blocking copy", nullptr, -1);
}

void fill_device(C_DeviceInterface* f) {
  f->initialize = [] { return C_SUCCESS; };
  f->finalize = [] { return C_SUCCESS; };
  f->init_device = [](const C_Device) { return C_SUCCESS; };
  f->deinit_device = [](const C_Device) { return C_SUCCESS; };
  f->set_device = [](const C_Device device) { return current_device = device->id, C_SUCCESS; };
  f->get_device = [](const C_Device device) { return device->id = current_device, C_SUCCESS; };
  f->get_device_count = [](size_t* count) { return *count = kNumDevices, C_SUCCESS; };
  f->get_device_list = [](size_t* list) { return list[0] = 0, list[1] = kPinned, C_SUCCESS; };
  f->synchronize_device = [](const C_Device) { return wait("device", nullptr, -1); };
  // of an H100
  f->is_float16_supported = [](const C_Device, bool* yes) { return *yes = true, C_SUCCESS; };
  f->is_bfloat16_supported = [](const C_Device, bool* yes) { return *yes = true, C_SUCCESS; };
  f->get_runtime_version = [](const C_Device, size_t* version) { return *version = 1, C_SUCCESS; };
  f->get_driver_version = [](const C_Device, size_t* version) { return *version = 1, C_SUCCESS; };
  f->get_compute_capability = [](const C_Device, size_t* capability) { return *capability = 90, C_SUCCESS; };
  f->get_multi_process = [](const C_Device, size_t* count) { return *count = 132, C_SUCCESS; };
  f->get_max_threads_per_mp = [](const C_Device, size_t* count) { return *count = 2048, C_SUCCESS; };
  f->get_max_threads_per_block = [](const C_Device, size_t* count) { return *count = 1024, C_SUCCESS; };
}

void fill_streams(C_DeviceInterface* f) {
  f->create_stream = [](const C_Device, C_Stream* stream) {
    return *stream = reinterpret_cast<C_Stream>(open_stream()), C_SUCCESS;
  };
  f->destroy_stream = [](const C_Device, C_Stream) { return C_SUCCESS; };
  f->query_stream = [](const C_Device, C_Stream) { return C_SUCCESS; };
  f->stream_add_callback = [](const C_Device device, C_Stream stream, C_Callback callback, void* data) {
    C_Status status = C_SUCCESS;
    callback(device, stream, data, &status);
    return status;
  };
  f->synchronize_stream = [](const C_Device, C_Stream stream) { return wait("stream", stream, -1); };
  f->create_event = [](const C_Device, C_Event* event) {
    static int64_t count = 0;
    return *event = reinterpret_cast<C_Event>(new Event{count++}), C_SUCCESS;
  };
  f->destroy_event = [](const C_Device, C_Event) { return C_SUCCESS; };  // Paddle 3.3.1 destroys some of them twice
  f->record_event = [](const C_Device, C_Stream stream, C_Event event) {
    Work work;
    work.about = event_at(event)->number;
    return note(What::record_event, stream_at(stream), "record", work), C_SUCCESS;
  };
  f->stream_wait_event = [](const C_Device, C_Stream stream, C_Event event) {
    Work work;
    work.about = event_at(event)->number;
    return note(What::wait_event, stream_at(stream), "wait", work), C_SUCCESS;
  };
  f->query_event = [](const C_Device, C_Event) { return C_SUCCESS; };
  f->synchronize_event = [](const C_Device, C_Event event) { return wait("event", nullptr, event_at(event)->number); };
}

void fill_memory(C_DeviceInterface* f) {
  f->device_memory_allocate = allocate;
  f->device_memory_deallocate = release;
  f->device_memory_set = [](const C_Device, void* address, unsigned char value, size_t size) {
    if (size <= kSmall) std::memset(address, value, size);
    Work work;
    work.bytes = size;
    return note(What::copy, stream_of(nullptr), "memset", work), C_SUCCESS;
  };
  f->host_memory_allocate = [](const C_Device, void** address, size_t size) {
    return (*address = std::malloc(size)) ? C_SUCCESS : C_FAILED;
  };
  f->host_memory_deallocate = [](const C_Device, void* address, size_t) { return std::free(address), C_SUCCESS; };
  f->device_memory_stats = [](const C_Device device, size_t* all, size_t* free) {
    return *all = total(), *free = total() - std::min(used[device->id], total()), C_SUCCESS;
  };
  f->device_min_chunk_size = [](const C_Device, size_t* size) { return *size = 256, C_SUCCESS; };
  f->device_max_chunk_size = [](const C_Device, size_t* size) { return *size = total(), C_SUCCESS; };
  f->device_max_alloc_size = [](const C_Device, size_t* size) { return *size = total(), C_SUCCESS; };
  f->device_extra_padding_size = [](const C_Device, size_t* size) { return *size = 0, C_SUCCESS; };
  f->device_init_alloc_size = [](const C_Device, size_t* size) { return *size = 64 << 20, C_SUCCESS; };
  f->device_realloc_size = [](const C_Device, size_t* size) { return *size = 64 << 20, C_SUCCESS; };
}

void fill_copies(C_DeviceInterface* f) {
  f->memory_copy_h2d = [](const C_Device, void* to, const void* from, size_t size) {
    return move_now(What::upload, to, from, size);
  };
  f->memory_copy_d2h = [](const C_Device, void* to, const void* from, size_t size) {
    return move_now(What::read, to, from, size);
  };
  f->memory_copy_d2d = [](const C_Device, void* to, const void* from, size_t size) {
    return move(What::copy, nullptr, to, from, size);
  };
  f->memory_copy_p2p = [](const C_Device to_device, const C_Device from_device, void* to, const void* from,
                          size_t size) {
    move_between(to_device, from_device, nullptr, to, from, size);
    return wait("blocking copy", nullptr, -1);
  };
  f->async_memory_copy_h2d = [](const C_Device, C_Stream stream, void* to, const void* from, size_t size) {
    return move(What::upload, stream, to, from, size);
  };
  f->async_memory_copy_d2h = [](const C_Device, C_Stream stream, void* to, const void* from, size_t size) {
    return move(What::read, stream, to, from, size);
  };
  f->async_memory_copy_d2d = [](const C_Device, C_Stream stream, void* to, const void* from, size_t size) {
    return move(What::copy, stream, to, from, size);
  };
  f->async_memory_copy_p2p = [](const C_Device to_device, const C_Device from_device, C_Stream stream, void* to,
                                const void* from, size_t size) {
    return move_between(to_device, from_device, stream, to, from, size);
  };
}

}  // namespace
}  // namespace rehearse

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Paddle calls it for each library in CUSTOM_DEVICE_ROOT.
EXPORTED void InitPlugin(CustomRuntimeParams* params) {
  PADDLE_CUSTOM_RUNTIME_CHECK_VERSION(params);
  params->device_type = const_cast<char*>(rehearse::kDeviceType);
  params->sub_device_type = const_cast<char*>("virtual");
  std::memset(params->interface, 0, sizeof(C_DeviceInterface));
  params->interface->size = sizeof(C_DeviceInterface);
  rehearse::fill_device(params->interface);
  rehearse::fill_streams(params->interface);
  rehearse::fill_memory(params->interface);
  rehearse::fill_copies(params->interface);
  rehearse::fill_collectives(params->interface);
  rehearse::register_kernels();
  rehearse::register_reshard();
}

// Bytes that Paddle's allocator has taken: of the device now, the most so far, and the most of pinned host memory.
EXPORTED void rehearse_memory(uint64_t* to) {
  to[0] = rehearse::used[0];
  to[1] = rehearse::most_used[0];
  to[2] = rehearse::most_used[rehearse::kPinned];
}
