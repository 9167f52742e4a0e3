#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>

#include "settings.h"

namespace sim {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kSize = size_t(24) << 30;  // addresses; only pages that are touched take memory

class Arena {
 public:
  Arena() {
    const int file = memfd_create("sim", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, kSize) != 0) fail();
    const int rights = setting("SIM_PROTECT", 1) ? PROT_NONE : PROT_READ | PROT_WRITE;
    outer_ = map(file, rights);
    inner_ = map(file, PROT_READ | PROT_WRITE);
    close(file);
    holes_[0] = kSize;
  }

  void* allocate(size_t size) {
    size = rounded(size);
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto hole = holes_.begin(); hole != holes_.end(); ++hole) {
      if (hole->second < size) continue;
      const auto [offset, room] = *hole;
      holes_.erase(hole);
      if (room > size) holes_[offset + size] = room - size;
      ++figures_.allocations;
      figures_.used += size;
      if (figures_.used > figures_.peak) figures_.peak = figures_.used;
      poison(inner_ + offset, size);
      return outer_ + offset;
    }
    return nullptr;
  }

  void release(void* address, size_t size) {
    size = rounded(size);
    std::lock_guard<std::mutex> lock(mutex_);
    const size_t offset = static_cast<char*>(address) - outer_;
    madvise(inner_ + offset, size, MADV_REMOVE);  // gives the pages back
    ++figures_.releases;
    figures_.used -= size;
    auto hole = holes_.emplace(offset, size).first;
    if (auto next = std::next(hole); next != holes_.end() && offset + size == next->first) {
      hole->second += next->second;
      holes_.erase(next);
    }
    if (hole == holes_.begin()) return;
    auto before = std::prev(hole);
    if (before->first + before->second != offset) return;
    before->second += hole->second;
    holes_.erase(hole);
  }

  bool contains(const void* address) const {
    auto* byte = static_cast<const char*>(address);
    return byte >= outer_ && byte < outer_ + kSize;
  }

  char* inner(const void* address) const { return inner_ + (static_cast<const char*>(address) - outer_); }

  MemoryFigures figures() {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = figures_;
    found.total = kSize;
    return found;
  }

 private:
  static size_t rounded(size_t size) { return (size + kPage - 1) / kPage * kPage; }

  static void fail() {
    std::perror("sim: device memory");
    std::abort();
  }

  static char* map(int file, int rights) {
    void* found = mmap(nullptr, kSize, rights, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (found == MAP_FAILED) fail();
    return static_cast<char*>(found);
  }

  std::mutex mutex_;
  std::map<size_t, size_t> holes_;  // offset -> size
  char* outer_ = nullptr;
  char* inner_ = nullptr;
  MemoryFigures figures_{};
};

Arena& arena() {
  static auto* only = new Arena;  // never destroyed: streams may use it until the process ends
  return *only;
}

}  // namespace

void* allocate(size_t size) { return arena().allocate(size); }

void release(void* address, size_t size) { arena().release(address, size); }

bool is_device(const void* address) { return arena().contains(address); }

void* inner(const void* address) {
  return is_device(address) ? arena().inner(address) : const_cast<void*>(address);
}

void poison(void* inner_address, size_t size) {
  static const bool is_on = setting("SIM_POISON", 1);
  if (is_on) std::memset(inner_address, 0xFF, size);
}

MemoryFigures memory_figures() { return arena().figures(); }

}  // namespace sim
