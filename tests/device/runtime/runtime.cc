// The runtime that Paddle's CustomDevice interface asks for: device, streams, events, memory, copies.
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>

#include "collectives.h"
#include "kernels.h"
#include "memory.h"
#include "simulated_reshard.h"
#include "settings.h"
#include "streams.h"

namespace sim {
namespace {

thread_local int current_device = 0;

Event* event_of(C_Event event) { return reinterpret_cast<Event*>(event); }

void move(void* to, const void* from, size_t size) { std::memmove(inner(to), inner(from), size); }

// A blocking copy waits for no stream: Paddle synchronises the one that it needs. (cudaMemcpy waits for all streams
// that were not created otherwise, which hides waits that are missing; SIM_COPIES_WAIT=1 does so too.)
void copy_now(const char* what, void* to, const void* from, size_t size) {
  static const bool waits = setting("SIM_COPIES_WAIT", 0);
  if (waits) synchronize_all();
  touch_by_host({what, {{from, size}}, {{to, size}}});
  move(to, from, size);
}

// The host's memory is read when the copy is launched, as CUDA does with memory that is not pinned.
void copy_to_device(Stream* stream, void* to, const void* from, size_t size) {
  auto held = std::make_shared<std::string>(static_cast<const char*>(from), size);
  stream->put({"copy to device", {}, {{to, size}}}, [=] { move(to, held->data(), size); });
}

// It is over when the call returns, as for memory that is not pinned.
void copy_to_host(Stream* stream, void* to, const void* from, size_t size) {
  stream->put({"copy to host", {{from, size}}, {}}, [=] { move(to, from, size); });
  stream->drain();
}

void copy_on_device(Stream* stream, void* to, const void* from, size_t size) {
  stream->put({"copy on device", {{from, size}}, {{to, size}}}, [=] {
    be_late();
    move(to, from, size);
  });
}

void fill_device(C_DeviceInterface* f) {
  f->initialize = [] { return C_SUCCESS; };
  f->finalize = [] { return C_SUCCESS; };
  f->init_device = [](const C_Device) { return C_SUCCESS; };
  f->deinit_device = [](const C_Device) { return C_SUCCESS; };
  f->set_device = [](const C_Device device) { return current_device = device->id, C_SUCCESS; };
  f->get_device = [](const C_Device device) { return device->id = current_device, C_SUCCESS; };
  f->get_device_count = [](size_t* count) { return *count = setting("SIM_DEVICES", 8), C_SUCCESS; };
  f->get_device_list = [](size_t* list) {
    for (int64_t i = 0; i < setting("SIM_DEVICES", 8); ++i) list[i] = i;
    return C_SUCCESS;
  };
  f->synchronize_device = [](const C_Device) { return synchronize_all(), C_SUCCESS; };
  f->is_float16_supported = [](const C_Device, bool* yes) { return *yes = true, C_SUCCESS; };
  f->is_bfloat16_supported = [](const C_Device, bool* yes) { return *yes = true, C_SUCCESS; };
  f->get_runtime_version = [](const C_Device, size_t* version) { return *version = 1, C_SUCCESS; };
  f->get_driver_version = [](const C_Device, size_t* version) { return *version = 1, C_SUCCESS; };
  f->get_compute_capability = [](const C_Device, size_t* capability) { return *capability = 90, C_SUCCESS; };
}

void fill_streams(C_DeviceInterface* f) {
  f->create_stream = [](const C_Device, C_Stream* stream) {
    return *stream = reinterpret_cast<C_Stream>(open_stream()), C_SUCCESS;
  };
  f->destroy_stream = [](const C_Device, C_Stream stream) { return close_stream(stream_of(stream)), C_SUCCESS; };
  f->query_stream = [](const C_Device, C_Stream stream) {
    return stream_of(stream)->is_idle() ? C_SUCCESS : C_FAILED;
  };
  f->stream_add_callback = [](const C_Device device, C_Stream stream, C_Callback callback, void* data) {
    stream_of(stream)->put([=] {
      C_Status status = C_SUCCESS;
      callback(device, stream, data, &status);
    });
    return C_SUCCESS;
  };
  f->synchronize_stream = [](const C_Device, C_Stream stream) { return stream_of(stream)->synchronize(), C_SUCCESS; };
  f->create_event = [](const C_Device, C_Event* event) {
    return *event = reinterpret_cast<C_Event>(new Event), C_SUCCESS;
  };
  f->destroy_event = [](const C_Device, C_Event) { return C_SUCCESS; };  // Paddle 3.3.1 destroys some of them twice
  f->record_event = [](const C_Device, C_Stream stream, C_Event event) {
    return event_of(event)->record(stream_of(stream)), C_SUCCESS;
  };
  f->query_event = [](const C_Device, C_Event event) { return event_of(event)->is_over() ? C_SUCCESS : C_FAILED; };
  f->synchronize_event = [](const C_Device, C_Event event) { return event_of(event)->synchronize(), C_SUCCESS; };
  f->stream_wait_event = [](const C_Device, C_Stream stream, C_Event event) {
    return event_of(event)->make_wait(stream_of(stream)), C_SUCCESS;
  };
}

void fill_memory(C_DeviceInterface* f) {
  f->device_memory_allocate = [](const C_Device, void** address, size_t size) {
    return (*address = allocate(size)) ? C_SUCCESS : C_FAILED;
  };
  f->device_memory_deallocate = [](const C_Device, void* address, size_t size) {
    drain_all();  // as cudaFree does; nobody may lean on it, so it is no order
    forget({address, size});
    return release(address, size), C_SUCCESS;
  };
  f->device_memory_set = [](const C_Device, void* address, unsigned char value, size_t size) {
    touch_by_host({"memory set", {}, {{address, size}}});
    return std::memset(inner(address), value, size), C_SUCCESS;
  };
  f->host_memory_allocate = [](const C_Device, void** address, size_t size) {
    return (*address = std::malloc(size)) ? C_SUCCESS : C_FAILED;
  };
  f->host_memory_deallocate = [](const C_Device, void* address, size_t) { return std::free(address), C_SUCCESS; };
  f->device_memory_stats = [](const C_Device, size_t* total, size_t* free) {
    const auto figures = memory_figures();
    return *total = figures.total, *free = figures.total - figures.used, C_SUCCESS;
  };
  f->device_min_chunk_size = [](const C_Device, size_t* size) { return *size = 256, C_SUCCESS; };
}

void fill_copies(C_DeviceInterface* f) {
  f->memory_copy_h2d = [](const C_Device, void* to, const void* from, size_t size) {
    return copy_now("blocking copy to device", to, from, size), C_SUCCESS;
  };
  f->memory_copy_d2h = [](const C_Device, void* to, const void* from, size_t size) {
    return copy_now("blocking copy to host", to, from, size), C_SUCCESS;
  };
  f->memory_copy_d2d = [](const C_Device, void* to, const void* from, size_t size) {
    return copy_now("blocking copy on device", to, from, size), C_SUCCESS;
  };
  f->memory_copy_p2p = [](const C_Device, const C_Device, void* to, const void* from, size_t size) {
    return copy_now("blocking copy between devices", to, from, size), C_SUCCESS;
  };
  f->async_memory_copy_h2d = [](const C_Device, C_Stream stream, void* to, const void* from, size_t size) {
    return copy_to_device(stream_of(stream), to, from, size), C_SUCCESS;
  };
  f->async_memory_copy_d2h = [](const C_Device, C_Stream stream, void* to, const void* from, size_t size) {
    return copy_to_host(stream_of(stream), to, from, size), C_SUCCESS;
  };
  f->async_memory_copy_d2d = [](const C_Device, C_Stream stream, void* to, const void* from, size_t size) {
    return copy_on_device(stream_of(stream), to, from, size), C_SUCCESS;
  };
  f->async_memory_copy_p2p = [](const C_Device, const C_Device, C_Stream stream, void* to, const void* from,
                                size_t size) {
    return copy_on_device(stream_of(stream), to, from, size), C_SUCCESS;
  };
}

}  // namespace
}  // namespace sim

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Paddle calls it for each library in CUSTOM_DEVICE_ROOT.
EXPORTED void InitPlugin(CustomRuntimeParams* params) {
  PADDLE_CUSTOM_RUNTIME_CHECK_VERSION(params);
  params->device_type = const_cast<char*>("sim");
  params->sub_device_type = const_cast<char*>("simulated");
  std::memset(params->interface, 0, sizeof(C_DeviceInterface));
  params->interface->size = sizeof(C_DeviceInterface);
  sim::fill_device(params->interface);
  sim::fill_streams(params->interface);
  sim::fill_memory(params->interface);
  sim::fill_copies(params->interface);
  sim::fill_collectives(params->interface);
  sim::register_kernels();
  sim::register_reshard();
}

namespace {

std::mutex hold_mutex;
std::condition_variable hold_changed;
bool is_held = false;

}  // namespace

// For tests: no stream does anything more until `sim_let_go`, whatever is put on it.
EXPORTED void sim_hold() {
  std::lock_guard<std::mutex> lock(hold_mutex);
  is_held = true;
  sim::put_on_all([] {
    std::unique_lock<std::mutex> lock(hold_mutex);
    hold_changed.wait(lock, [] { return !is_held; });
  });
}

EXPORTED void sim_let_go() {
  std::lock_guard<std::mutex> lock(hold_mutex);
  is_held = false;
  hold_changed.notify_all();
}

// For tests: the text of the last error of order, cut to fit.
EXPORTED void sim_last_unordered(char* to, size_t size) {
  std::snprintf(to, size, "%s", sim::last_unordered().c_str());
}

// For tests: allocations, releases, bytes in use, highest use, kernels, kernels for which the host waited, errors of order.
EXPORTED void sim_figures(uint64_t* to) {
  const auto memory = sim::memory_figures();
  const auto kernels = sim::kernel_figures();
  const uint64_t all[] = {memory.allocations, memory.releases, memory.used,          memory.peak,
                          kernels.launched,   kernels.waited,  sim::count_unordered()};
  std::memcpy(to, all, sizeof(all));
}
