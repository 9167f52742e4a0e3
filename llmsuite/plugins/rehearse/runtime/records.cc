#include "records.h"

#include <ctime>

#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>

// paddle/phi/core/memory/stats.h, which includes a header that the wheel does not have
namespace paddle::memory {
int64_t DeviceMemoryStatCurrentValue(const std::string& what, int device);
}

namespace rehearse {
namespace {

constexpr int kNumKinds = 8;
constexpr int kAllocation = kNumKinds;  // of the mask of `rehearse_locate`

struct Record {
  What what;
  int stream, name, where, group;
  double flops, bytes, host_ns;
  int64_t about;
};

struct Allocation {
  std::weak_ptr<phi::Allocation> memory;
  size_t bytes;
  int name, where;
};

struct Held {
  size_t bytes;
  int name, where;
};

std::mutex mutex;
std::vector<std::unique_ptr<Stream>> streams;
std::vector<Record> records;
std::unordered_map<std::string, int> numbers;  // of names
std::vector<std::string> names;
std::vector<Allocation> allocations;
size_t next_sweep = 1024;
int64_t awaited_peak = -1;  // bytes; no peak is awaited where it is negative
std::vector<Held> peak;
int (*locate)(int) = nullptr;
unsigned located = 0;  // a bit for each kind

// Of this thread: what other processes of the machine do is not counted.
double host_ns() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return now.tv_sec * 1e9 + now.tv_nsec;
}

int number_of(const std::string& name) {
  auto [found, is_new] = numbers.emplace(name, static_cast<int>(names.size()));
  if (is_new) names.push_back(name);
  return found->second;
}

// The line of Python, as a number of Python's; -1 where nobody asks. Not under the mutex: it takes Python's lock.
int where_of(int kind) { return locate && (located >> kind & 1) ? locate(kind) : -1; }

void forget_freed() {
  std::vector<Allocation> alive;
  for (auto& each : allocations) {
    if (!each.memory.expired()) alive.push_back(each);
  }
  allocations.swap(alive);
  next_sweep = 2 * allocations.size() + 1024;
}

int64_t allocated() { return paddle::memory::DeviceMemoryStatCurrentValue("Allocated", 0); }

}  // namespace

Stream* open_stream() {
  std::lock_guard<std::mutex> lock(mutex);
  streams.push_back(std::make_unique<Stream>(Stream{static_cast<int>(streams.size()) + 1}));
  return streams.back().get();
}

Stream* stream_of(const void* stream) {
  static Stream by_default{0};
  return stream ? static_cast<Stream*>(const_cast<void*>(stream)) : &by_default;
}

void note(What what, const Stream* stream, const std::string& name, const Work& work) {
  const int where = where_of(static_cast<int>(what));
  std::lock_guard<std::mutex> lock(mutex);
  records.push_back({what, stream->number, number_of(name), where, number_of(work.group), work.flops, work.bytes,
                     host_ns(), work.about});
}

void note_allocation(const phi::DenseTensor& tensor, const std::string& name) {
  const int where = where_of(kAllocation);
  std::lock_guard<std::mutex> lock(mutex);
  if (allocations.size() >= next_sweep) forget_freed();
  allocations.push_back({tensor.Holder(), tensor.Holder()->size(), number_of(name), where});
  if (awaited_peak < 0 || allocated() < awaited_peak) return;
  awaited_peak = -1;
  forget_freed();
  peak.clear();
  for (auto& each : allocations) peak.push_back({each.bytes, each.name, each.where});
}

}  // namespace rehearse

#define EXPORTED extern "C" __attribute__((visibility("default")))

using namespace rehearse;

// `function` returns the number of the current line of Python; it is called for the kinds of a mask, see `What`, and
// with the bit behind them for allocations.
EXPORTED void rehearse_locate(int (*function)(int), unsigned mask) {
  locate = function;
  located = mask;
}

EXPORTED void rehearse_forget_records() {
  std::lock_guard<std::mutex> lock(rehearse::mutex);
  records.clear();
}

// The number of records so far.
EXPORTED int64_t rehearse_num_records() {
  std::lock_guard<std::mutex> lock(rehearse::mutex);
  return static_cast<int64_t>(records.size());
}

// When so many bytes are allocated, what is alive is noted: once, for `rehearse_write_peak`.
EXPORTED void rehearse_await_peak(int64_t bytes) {
  std::lock_guard<std::mutex> lock(rehearse::mutex);
  awaited_peak = bytes;
}

// Notes what is alive now.
EXPORTED void rehearse_note_alive() {
  std::lock_guard<std::mutex> lock(rehearse::mutex);
  forget_freed();
  peak.clear();
  for (auto& each : allocations) peak.push_back({each.bytes, each.name, each.where});
}

// Lines of numbers and names, split by tabs: what, stream, name, where, group, flops, bytes, nanoseconds of the host,
// about. Returns 0, or -1 where the file cannot be written.
EXPORTED int rehearse_write_records(const char* path) {
  std::lock_guard<std::mutex> lock(rehearse::mutex);
  FILE* file = std::fopen(path, "w");
  if (!file) return -1;
  for (auto& each : records) {
    std::fprintf(file, "%d\t%d\t%s\t%d\t%s\t%.0f\t%.0f\t%.0f\t%ld\n", static_cast<int>(each.what), each.stream,
                 names[each.name].c_str(), each.where, names[each.group].c_str(), each.flops, each.bytes, each.host_ns,
                 static_cast<long>(each.about));
  }
  return std::fclose(file) == 0 ? 0 : -1;
}

// Lines of what was alive at the peak: bytes, name, where.
EXPORTED int rehearse_write_peak(const char* path) {
  std::lock_guard<std::mutex> lock(rehearse::mutex);
  FILE* file = std::fopen(path, "w");
  if (!file) return -1;
  for (auto& each : peak) {
    std::fprintf(file, "%zu\t%s\t%d\n", each.bytes, names[each.name].c_str(), each.where);
  }
  return std::fclose(file) == 0 ? 0 : -1;
}
