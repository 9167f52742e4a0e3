// The kernels of the virtual device: each allocates its outputs, whose shapes Paddle has inferred, and is noted.
#pragma once

namespace rehearse {

void register_kernels();

}  // namespace rehearse
