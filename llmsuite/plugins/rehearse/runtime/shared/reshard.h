// Other placements of a distributed tensor on the same mesh: Paddle 3.3.1 has them for CPU, CUDA and XPU only.
#pragma once
#include <memory>
#include <vector>

#include "paddle/phi/backends/custom/custom_context.h"
#include "paddle/phi/core/distributed/auto_parallel/dist_tensor.h"
#include "paddle/phi/core/distributed/auto_parallel/reshard/reshard_function.h"

namespace custom_device {

using Coordinate = std::vector<int64_t>;  // of this rank, on each axis of a mesh

int dim_on(const phi::distributed::TensorDistAttr& attr, int axis);  // that is split over an axis; -1 for none
bool is_same(const phi::distributed::TensorDistAttr& a, const phi::distributed::TensorDistAttr& b, int axis);
phi::DDim local_dims(phi::DDim dims, const phi::distributed::TensorDistAttr& attr, const Coordinate& coordinate);
std::vector<int64_t> ranks_along(const phi::distributed::ProcessMesh& mesh, Coordinate coordinate, int axis);

class Reshard : public phi::distributed::ReshardFunction {
 public:
  bool IsSuitable(const phi::distributed::DistTensor& in, const phi::distributed::TensorDistAttr& to) override;
  void Eval(phi::DeviceContext* context, const phi::distributed::DistTensor& in,
            const phi::distributed::TensorDistAttr& to, phi::distributed::DistTensor* out) override;

 protected:
  // This rank's part with the new placements.
  virtual phi::DenseTensor change(phi::CustomContext* device, const phi::distributed::DistTensor& in,
                                  const phi::distributed::TensorDistAttr& to, const Coordinate& coordinate) = 0;
};

void register_reshard(std::unique_ptr<Reshard> reshard);

}  // namespace custom_device
