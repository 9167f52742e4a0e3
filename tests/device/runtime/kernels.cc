#include "kernels.h"

#include <regex>

#include "call.h"

namespace sim {
namespace {

// Their outputs have sizes that the host does not know, they draw random numbers, which have an order, or they look at
// more than their arguments.
const std::regex kWaits(
    ".*(random|gaussian|uniform|randint|randperm|multinomial|bernoulli|poisson|exponential|dropout|binomial|gamma|"
    "nonzero|masked_select|unique|where_index|nms|_array|set_value_with|assign_value|rnn|lstm|accuracy|auc|coalesce|"
    "full|empty|repeat_interleave_with_tensor).*");

const std::regex kViews("flatten2?|reshape2?.*");  // of the host's memory

// Kernels that a build lacks, as a vendor's plug-in may: Paddle then computes on the host. None by default.
#ifndef SIM_LEAVES_OUT
#define SIM_LEAVES_OUT ""
#endif
const std::regex kLeftOut(SIM_LEAVES_OUT);

bool prepare(Kernel* kernel) {
  kernel->waits = std::regex_match(kernel->name, kWaits);
  return !std::regex_match(kernel->name, kViews) && !std::regex_match(kernel->name, kLeftOut);
}

}  // namespace

void register_kernels() {
  custom_device::take_over_cpu_kernels("sim", call, prepare);
  custom_device::seal_kernels();
}

}  // namespace sim
