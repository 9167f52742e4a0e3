// Other placements of distributed tensors on the virtual device: the messages that a GPU would send.
#pragma once

namespace rehearse {

void register_reshard();

}  // namespace rehearse
