// The communication library of the device, as Paddle's ProcessGroupCustom calls it.
#pragma once
#include "paddle/phi/backends/device_ext.h"

namespace sim {

void fill_collectives(C_DeviceInterface* interface);

void all_reduce(const void* from, void* to, size_t count, C_DataType type, C_CCLReduceOp op, C_CCLComm comm,
                C_Stream stream);
void all_gather(const void* from, void* to, size_t count, C_DataType type, C_CCLComm comm, C_Stream stream);

}  // namespace sim
