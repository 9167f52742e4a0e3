#include "messages.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "memory.h"

namespace sim {
namespace {

constexpr size_t kRoom = size_t(4) << 30;  // addresses for the largest message; only what is used takes memory

std::string path(const std::string& name) { return "/dev/shm/" + name; }

void* map(const std::string& name, size_t size) {
  const int file = open(path(name).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  void* found = MAP_FAILED;
  if (file >= 0 && ftruncate(file, size) == 0) {
    found = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    close(file);
  }
  if (found == MAP_FAILED) {
    std::perror("sim: shared memory");
    std::abort();
  }
  return found;
}

void be_late() {
  static const int64_t lateness = setting("SIM_LATE_MESSAGES_US", 0);
  if (lateness) std::this_thread::sleep_for(std::chrono::microseconds(lateness));
}

std::string slot_name(const std::string& name, size_t rank) { return name + "-" + std::to_string(rank); }

std::string mailbox_name(const std::string& name, size_t from, size_t to) {
  return name + "-" + std::to_string(from) + "-" + std::to_string(to);
}

}  // namespace

struct Communicator::Shared {  // begins as zeros
  std::atomic<uint64_t> opened;
  std::atomic<uint64_t> arrived[kMostRanks];  // 2 n - 1: in its call n; 2 n: it has got what it wanted from it
  char what[kMostRanks][64];                  // the call that a rank is in
  std::atomic<uint64_t> sent[kMostRanks][kMostRanks], received[kMostRanks][kMostRanks], size[kMostRanks][kMostRanks];
};

Communicator::Communicator(const std::string& name, size_t num_ranks, size_t rank)
    : name_(name), num_ranks_(num_ranks), rank_(rank) {
  shared_ = static_cast<Shared*>(map(name, sizeof(Shared)));
  if (num_ranks > kMostRanks) end_process("more than 64 ranks");
  for (size_t each = 0; each < num_ranks; ++each) slots_.push_back(static_cast<char*>(map(slot_name(name, each), kRoom)));
  mailboxes_.assign(num_ranks, std::vector<char*>(num_ranks, nullptr));
  for (size_t each = 0; each < num_ranks; ++each) {
    mailbox(rank, each);
    mailbox(each, rank);
  }
  ++shared_->opened;
  wait("open", [&] { return shared_->opened == num_ranks_; });
  if (rank != 0) return;
  unlink(path(name).c_str());  // the mappings stay
  for (size_t from = 0; from < num_ranks; ++from) {
    unlink(path(slot_name(name, from)).c_str());
    for (size_t to = 0; to < num_ranks; ++to) unlink(path(mailbox_name(name, from, to)).c_str());
  }
}

void Communicator::end_process(const std::string& why) {
  std::fprintf(stderr, "sim: rank %zu of %zu of %s: %s\n", rank_, num_ranks_, name_.c_str(), why.c_str());
  std::abort();
}

char* Communicator::mailbox(size_t from, size_t to) {
  char*& found = mailboxes_[from][to];
  if (!found) found = static_cast<char*>(map(mailbox_name(name_, from, to), kRoom));
  return found;
}

void Communicator::together(const std::string& what, const void* mine, size_t size, void* poisoned, size_t poisoned_size,
                            const std::function<void(const std::vector<const char*>&)>& use) {
  if (size > kRoom) end_process(what + ": the message is too large");
  auto& arrived = shared_->arrived;
  const uint64_t call = ++num_calls_;
  auto have_all = [&](uint64_t when) {
    for (size_t each = 0; each < num_ranks_; ++each) {
      if (arrived[each] < when) return false;
    }
    return true;
  };
  wait(what, [&] { return have_all(2 * (call - 1)); });  // nobody reads the slots any more
  if (mine) std::memcpy(slots_[rank_], inner(mine), size);
  std::strncpy(shared_->what[rank_], what.c_str(), sizeof(shared_->what[rank_]) - 1);
  if (poisoned) poison(inner(poisoned), poisoned_size);
  arrived[rank_] = 2 * call - 1;
  wait(what, [&] { return have_all(2 * call - 1); });
  for (size_t each = 0; each < num_ranks_; ++each) {
    const std::string other = shared_->what[each];
    if (what.substr(0, sizeof(shared_->what[each]) - 1) != other) {
      end_process("it calls " + what + ", and rank " + std::to_string(each) + " calls " + other);
    }
  }
  be_late();
  use({slots_.begin(), slots_.end()});
  arrived[rank_] = 2 * call;
}

void Communicator::send(const void* data, size_t size, size_t peer) {
  const std::string what = "send to rank " + std::to_string(peer);
  if (size > kRoom) end_process(what + ": the message is too large");
  auto &sent = shared_->sent[rank_][peer], &received = shared_->received[rank_][peer];
  be_late();
  wait(what, [&] { return received == sent; });
  std::memcpy(mailbox(rank_, peer), inner(data), size);
  shared_->size[rank_][peer] = size;
  const uint64_t mine = ++sent;
  wait(what, [&] { return received == mine; });
}

void Communicator::receive(void* data, size_t size, size_t peer) {
  const std::string what = "receive from rank " + std::to_string(peer);
  auto &sent = shared_->sent[peer][rank_], &received = shared_->received[peer][rank_];
  poison(inner(data), size);
  wait(what, [&] { return sent > received; });
  be_late();
  if (shared_->size[peer][rank_] != size) {
    const std::string found = std::to_string(shared_->size[peer][rank_]);
    end_process(what + ": " + std::to_string(size) + " bytes are expected, and " + found + " are sent");
  }
  std::memcpy(inner(data), mailbox(peer, rank_), size);
  ++received;
}

}  // namespace sim
