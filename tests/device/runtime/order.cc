#include "order.h"

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <set>

#include "memory.h"
#include "paddle/common/enforce.h"
#include "paddle/common/errors.h"
#include "settings.h"

namespace sim {
namespace {

struct Operation {
  std::string what;
  int actor;
  uint64_t number;  // of this actor, from 1
};
using Known = std::shared_ptr<const Operation>;

struct Piece {  // of memory; all its bytes have been touched by the same operations
  uintptr_t end;
  Known writer;
  std::vector<Known> readers;  // since then, the last one of each actor
};

std::string named(const Operation& operation) {
  const std::string number = std::to_string(operation.number);
  if (operation.actor == kHost) return operation.what + " (operation " + number + " of the host)";
  return operation.what + " (operation " + number + " of stream " + std::to_string(operation.actor) + ")";
}

// 0: no check; 1: raise; 2: print each pair of names once
int64_t mode() {
  static const int64_t chosen = setting("SIM_ORDER", 1);
  return chosen;
}

class Order {
 public:
  int add_actor() {
    std::lock_guard<std::mutex> lock(mutex_);
    clocks_.emplace_back();
    return static_cast<int>(clocks_.size()) - 1;
  }

  void take(int actor, const Access& access) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& clock = clocks_.at(actor);
    join(&clock, clocks_[kHost]);
    count(&clock, actor);
    if (!mode()) return;
    auto own = std::make_shared<const Operation>(Operation{access.what, actor, clock[actor]});
    std::string error;
    for (auto& span : access.reads) compare(span, *own, clock, false, &error);
    for (auto& span : access.writes) compare(span, *own, clock, true, &error);
    if (!error.empty()) {
      ++unordered_;
      last_ = error;
    }
    if (!error.empty() && mode() == 1) {
      // it does not run. Paddle ends the process for errors of other types
      PADDLE_THROW(common::errors::PreconditionNotMet("sim: not ordered: %s", error));
    }
    for (auto& span : access.reads) note(span, own, false);
    for (auto& span : access.writes) note(span, own, true);
  }

  Clock clock_of(int actor) {
    std::lock_guard<std::mutex> lock(mutex_);
    return clocks_.at(actor);
  }

  void wait_for(int actor, const Clock& clock) {
    std::lock_guard<std::mutex> lock(mutex_);
    join(&clocks_.at(actor), clock);
  }

  void wait_for_all(int actor) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t each = 0; each < clocks_.size(); ++each) join(&clocks_.at(actor), clocks_[each]);
  }

  void forget(const Span& memory) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto [first, last] = range(memory);
    cut(first);
    cut(last);
    pieces_.erase(pieces_.lower_bound(first), pieces_.lower_bound(last));
  }

  std::string last() {
    std::lock_guard<std::mutex> lock(mutex_);
    return last_;
  }

  uint64_t unordered() {
    std::lock_guard<std::mutex> lock(mutex_);
    return unordered_;
  }

 private:
  static void join(Clock* clock, const Clock& other) {
    if (clock->size() < other.size()) clock->resize(other.size(), 0);
    for (size_t i = 0; i < other.size(); ++i) (*clock)[i] = std::max((*clock)[i], other[i]);
  }

  static void count(Clock* clock, int actor) {
    if (clock->size() <= static_cast<size_t>(actor)) clock->resize(actor + 1, 0);
    ++(*clock)[actor];
  }

  static bool is_after(const Clock& clock, const Operation& operation) {
    return static_cast<size_t>(operation.actor) < clock.size() && clock[operation.actor] >= operation.number;
  }

  static std::pair<uintptr_t, uintptr_t> range(const Span& span) {
    const auto start = reinterpret_cast<uintptr_t>(span.start);
    return {start, start + span.size};
  }

  // Makes a piece begin at an address that lies within one.
  void cut(uintptr_t at) {
    auto after = pieces_.upper_bound(at);
    if (after == pieces_.begin()) return;
    auto piece = std::prev(after);
    if (piece->first == at || piece->second.end <= at) return;
    auto second = piece->second;
    piece->second.end = at;
    pieces_.emplace(at, std::move(second));
  }

  void compare(const Span& span, const Operation& own, const Clock& clock, bool writes, std::string* error) {
    if (!span.size || !is_device(span.start)) return;
    const auto [first, last] = range(span);
    auto piece = pieces_.upper_bound(first);
    if (piece != pieces_.begin()) --piece;
    for (; piece != pieces_.end() && piece->first < last; ++piece) {
      auto& known = piece->second;
      if (known.end <= first) continue;
      if (known.writer) compare(*known.writer, true, own, clock, writes, piece->first, error);
      if (!writes) continue;
      for (auto& reader : known.readers) compare(*reader, false, own, clock, true, piece->first, error);
    }
  }

  void note(const Span& span, const Known& own, bool writes) {
    if (!span.size || !is_device(span.start)) return;
    const auto [first, last] = range(span);
    cut(first);
    cut(last);
    uintptr_t at = first;
    for (auto piece = pieces_.lower_bound(first); at < last; ++piece) {
      if (piece == pieces_.end() || piece->first > at) {  // nobody has touched what comes first
        const uintptr_t end = piece == pieces_.end() ? last : std::min(last, piece->first);
        piece = pieces_.emplace(at, Piece{end, nullptr, {}}).first;
      }
      auto& known = piece->second;
      if (writes) {
        known.writer = own;
        known.readers.clear();
      } else {
        auto& readers = known.readers;
        auto is_same = [&](const Known& reader) { return reader->actor == own->actor; };
        readers.erase(std::remove_if(readers.begin(), readers.end(), is_same), readers.end());
        readers.push_back(own);
      }
      at = known.end;
    }
  }

  void compare(const Operation& before, bool wrote, const Operation& own, const Clock& clock, bool writes,
               uintptr_t at, std::string* error) {
    if (is_after(clock, before)) return;
    const std::string text = named(own) + (writes ? " writes" : " reads") + " memory that " + named(before) +
                             (wrote ? " writes" : " reads") + ", and does not wait for it";
    if (error->empty()) *error = text;
    const std::string pair = own.what + (writes ? " w " : " r ") + before.what + (wrote ? " w" : " r");
    if (mode() != 2 || !printed_.insert(pair).second) return;
    std::fprintf(stderr, "sim: not ordered: %s (at %p)\n", text.c_str(), reinterpret_cast<void*>(at));
  }

  std::mutex mutex_;
  std::vector<Clock> clocks_{1};  // of the host
  std::map<uintptr_t, Piece> pieces_;
  std::set<std::string> printed_;
  std::string last_;
  uint64_t unordered_ = 0;
};

Order& order() {
  static auto* only = new Order;  // never destroyed: streams may use it until the process ends
  return *only;
}

}  // namespace

int add_actor() { return order().add_actor(); }

void launch(int stream, const Access& access) { order().take(stream, access); }

void touch_by_host(const Access& access) { order().take(kHost, access); }

Clock clock_of(int actor) { return order().clock_of(actor); }

void wait_for(int actor, const Clock& clock) { order().wait_for(actor, clock); }

void wait_for_all(int actor) { order().wait_for_all(actor); }

void forget(const Span& memory) { order().forget(memory); }

std::string last_unordered() { return order().last(); }

uint64_t count_unordered() { return order().unordered(); }

}  // namespace sim
