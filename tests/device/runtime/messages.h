// Messages between the ranks of one machine, through shared memory; they are passed on streams, and are over later.
//
// A communicator opens when all its ranks have come. A send is over when it has been received: no buffer hides that the
// other rank does not wait for it yet.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "settings.h"

namespace sim {

constexpr size_t kMostRanks = 64;

class Communicator {
 public:
  Communicator(const std::string& name, size_t num_ranks, size_t rank);  // returns when all ranks have come

  const std::string& name() const { return name_; }
  size_t num_ranks() const { return num_ranks_; }
  size_t rank() const { return rank_; }

  // A call of all ranks. Each gives `size` bytes (none: null), then `use` gets those of all. `what` has to be the same
  // on all ranks. `poisoned` is the memory that has no meaning until the call is over.
  void together(const std::string& what, const void* mine, size_t size, void* poisoned, size_t poisoned_size,
                const std::function<void(const std::vector<const char*>&)>& use);

  void send(const void* data, size_t size, size_t peer);
  void receive(void* data, size_t size, size_t peer);

 private:
  struct Shared;

  // Ends the process after SIM_PATIENCE seconds.
  template <typename Condition>
  void wait(const std::string& what, Condition&& is_met) {
    static const int64_t patience = setting("SIM_PATIENCE", 120);
    const auto since = std::chrono::steady_clock::now();
    for (int64_t turns = 0; !is_met(); ++turns) {
      if (turns > 200) std::this_thread::sleep_for(std::chrono::microseconds(50));
      if (turns % 4096 == 4095 && std::chrono::steady_clock::now() - since > std::chrono::seconds(patience)) {
        end_process(what + ": no answer after " + std::to_string(patience) + " seconds");
      }
    }
  }

  [[noreturn]] void end_process(const std::string& why);
  char* mailbox(size_t from, size_t to);

  std::string name_;
  size_t num_ranks_, rank_;
  Shared* shared_;
  uint64_t num_calls_ = 0;
  std::vector<char*> slots_;                   // of each rank, for calls of all
  std::vector<std::vector<char*>> mailboxes_;  // [from][to]
};

}  // namespace sim
