// A check of happens-before: who may read or write which device memory, whatever the time that operations take.
//
// The host and each stream are actors. Each has a vector clock: for every actor, the number of its operations that are
// surely over before the next operation of this one begins. An operation on a stream comes after everything that the
// host knew when it launched it; an event carries the clock of its stream to whoever waits for it. For each piece of
// memory the last writer and the readers since then are kept. An operation that touches memory of which some other
// access is not in its clock is an error, raised where it is launched: in every run, however late or early things are.
//
// All threads of the host count as one actor.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace sim {

struct Span {  // host memory is left out by the check
  const void* start;
  size_t size;
};

struct Access {
  std::string what;  // name of the operation
  std::vector<Span> reads, writes;
};

using Clock = std::vector<uint64_t>;  // actor -> number of its operations that are over

constexpr int kHost = 0;

int add_actor();  // number of a new stream

// Takes note of an operation. Throws a Paddle error with both operations where memory is touched that another actor
// has touched without an order between them.
void launch(int stream, const Access& access);
void touch_by_host(const Access& access);

Clock clock_of(int actor);
void wait_for(int actor, const Clock& clock);  // what comes next of it is after all in the clock
void wait_for_all(int actor);

void forget(const Span& memory);  // it is given back

uint64_t count_unordered();    // how many errors there were, with SIM_ORDER=2 too
std::string last_unordered();  // the text of the last one

}  // namespace sim
