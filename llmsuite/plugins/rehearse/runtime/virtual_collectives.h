// The communication library of the virtual device: it sends nothing, and notes what a rank would send.
#pragma once
#include "paddle/phi/backends/device_ext.h"

namespace rehearse {

void fill_collectives(C_DeviceInterface* interface);

}  // namespace rehearse
