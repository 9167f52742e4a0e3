// Streams and events: each stream is a thread that does what it is given, one after the other, later.
#pragma once
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "order.h"
#include "paddle/phi/backends/device_ext.h"

namespace sim {

class Stream {
 public:
  Stream();
  ~Stream();  // waits for what it still has to do

  int number() const { return number_; }

  // Returns at once. Throws a Paddle error where the access is not ordered with an earlier one (see order.h).
  void put(const Access& access, std::function<void()> work);
  void put(std::function<void()> work);  // what touches no device memory

  void drain();  // returns when all is done; says nothing about the order, see `synchronize`
  bool is_idle();
  void synchronize();  // `drain`; what the host does from now on is after it

 private:
  void run();

  int number_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool is_busy_ = false, stops_ = false;
  std::thread thread_;
};

class Event {
 public:
  void record(Stream* stream);
  void make_wait(Stream* stream);  // for what was recorded last, as do the others
  void synchronize();
  bool is_over();  // if so, what the host does from now on is after it

 private:
  uint64_t recorded(Clock* clock);

  struct State;  // streams may have it longer than the caller
  std::shared_ptr<State> state();
  std::mutex mutex_;
  std::shared_ptr<State> state_;
};

Stream* stream_of(C_Stream stream);  // the default stream for a null pointer
Stream* open_stream();
void close_stream(Stream* stream);
void synchronize_all();
void put_on_all(const std::function<void()>& work);
void drain_all();  // `Stream::drain` of each

void be_late();  // takes SIM_LATE_US, where a kernel or a copy begins

}  // namespace sim
