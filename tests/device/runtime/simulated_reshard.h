// Other placements of a distributed tensor on the same mesh: Paddle 3.3.1 has them for CPU, CUDA and XPU only.
#pragma once

namespace sim {

void register_reshard();

}  // namespace sim
