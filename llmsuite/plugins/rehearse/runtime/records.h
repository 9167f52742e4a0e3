// What a rank does at its device: each launch, message, copy, wait and event, in the order of the host.
//
// Nothing takes time here. Python gives each record a duration and plays the streams afterwards.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "paddle/phi/core/dense_tensor.h"

namespace rehearse {

enum class What : int {
  kernel,
  message,       // a collective call, a send or a receive
  upload,        // host to device
  read,          // device to host
  copy,          // on the device
  wait,          // of the host, for a stream, an event or the device
  record_event,  // on a stream
  wait_event,    // a stream waits for an event
};

struct Stream {
  int number;
};
Stream* open_stream();
Stream* stream_of(const void* stream);  // the default stream for a null pointer

struct Work {
  double flops = 0, bytes = 0;  // bytes of device memory that are read and written, or of the message
  int64_t about = -1;           // the event; of a message, the number of its ranks
  std::string group = "";       // ranks of a message
};
void note(What what, const Stream* stream, const std::string& name, const Work& work);

// Memory of a tensor, with the name of the kernel that allocated it and the line of Python that called it.
void note_allocation(const phi::DenseTensor& tensor, const std::string& name);

}  // namespace rehearse
