#include "streams.h"

#include <chrono>
#include <memory>
#include <set>

#include "settings.h"

namespace sim {

Stream::Stream() : number_(add_actor()), thread_([this] { run(); }) {}

Stream::~Stream() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stops_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

void Stream::put(const Access& access, std::function<void()> work) {
  std::lock_guard<std::mutex> lock(mutex_);  // the clock counts in the order of the queue
  launch(number_, access);
  queue_.push_back(std::move(work));
  changed_.notify_all();
}

void Stream::put(std::function<void()> work) {
  std::lock_guard<std::mutex> lock(mutex_);
  queue_.push_back(std::move(work));
  changed_.notify_all();
}

void Stream::drain() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return queue_.empty() && !is_busy_; });
}

void Stream::synchronize() {
  const Clock clock = clock_of(number_);
  drain();
  wait_for(kHost, clock);
}

bool Stream::is_idle() {
  const Clock clock = clock_of(number_);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (is_busy_ || !queue_.empty()) return false;
  }
  wait_for(kHost, clock);
  return true;
}

void Stream::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stops_ || !queue_.empty(); });
    if (queue_.empty()) return;
    auto work = std::move(queue_.front());
    queue_.pop_front();
    is_busy_ = true;
    lock.unlock();
    work();
    work = nullptr;  // gives back what it holds, while nobody waits for the lock
    lock.lock();
    is_busy_ = false;
    changed_.notify_all();
  }
}

struct Event::State {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0, reached = 0;
  Clock clock;  // of the stream when it was recorded last

  void wait(uint64_t which) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return reached >= which; });
  }
};

std::shared_ptr<Event::State> Event::state() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!state_) state_ = std::make_shared<State>();
  return state_;
}

uint64_t Event::recorded(Clock* clock) {
  const auto mine = state();
  std::lock_guard<std::mutex> lock(mine->mutex);
  *clock = mine->clock;
  return mine->recorded;
}

void Event::record(Stream* stream) {
  const auto mine = state();
  std::unique_lock<std::mutex> lock(mine->mutex);
  const uint64_t which = ++mine->recorded;
  mine->clock = clock_of(stream->number());
  lock.unlock();
  stream->put([mine, which] {
    std::lock_guard<std::mutex> lock(mine->mutex);
    if (which > mine->reached) mine->reached = which;
    mine->changed.notify_all();
  });
}

void Event::make_wait(Stream* stream) {
  Clock clock;
  const uint64_t which = recorded(&clock);
  wait_for(stream->number(), clock);
  stream->put([mine = state(), which] { mine->wait(which); });
}

void Event::synchronize() {
  Clock clock;
  const uint64_t which = recorded(&clock);
  state()->wait(which);
  wait_for(kHost, clock);
}

bool Event::is_over() {
  Clock clock;
  const uint64_t which = recorded(&clock);
  const auto mine = state();
  {
    std::lock_guard<std::mutex> lock(mine->mutex);
    if (mine->reached < which) return false;
  }
  wait_for(kHost, clock);
  return true;
}

namespace {

struct Streams {
  std::mutex mutex;
  std::set<Stream*> all;
};

Streams& streams() {
  static auto* only = new Streams;
  return *only;
}

std::set<Stream*> every_stream() {
  std::lock_guard<std::mutex> lock(streams().mutex);
  return streams().all;
}

}  // namespace

Stream* open_stream() {
  static const bool is_one = setting("SIM_ONE_STREAM", 0);
  static Stream* only = nullptr;
  if (is_one && only) return only;
  auto* made = only = new Stream;
  std::lock_guard<std::mutex> lock(streams().mutex);
  streams().all.insert(made);
  return made;
}

void close_stream(Stream* stream) {
  if (setting("SIM_ONE_STREAM", 0)) return;
  {
    std::lock_guard<std::mutex> lock(streams().mutex);
    streams().all.erase(stream);
  }
  delete stream;
}

Stream* stream_of(C_Stream stream) {
  static Stream* default_stream = open_stream();
  return stream ? reinterpret_cast<Stream*>(stream) : default_stream;
}

void synchronize_all() {
  wait_for_all(kHost);  // also for streams that are closed
  drain_all();
}

void put_on_all(const std::function<void()>& work) {
  for (auto* stream : every_stream()) stream->put(work);
}

void drain_all() {
  for (auto* stream : every_stream()) stream->drain();
}

void be_late() {
  static const int64_t lateness = setting("SIM_LATE_US", 0);
  if (lateness) std::this_thread::sleep_for(std::chrono::microseconds(lateness));
}

}  // namespace sim
