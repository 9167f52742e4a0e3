#include "reshard.h"

#include <algorithm>
#include <utility>

#include "paddle/phi/core/distributed/auto_parallel/reshard/reshard_function_registry.h"
#include "paddle/phi/core/distributed/auto_parallel/reshard/reshard_utils.h"

namespace custom_device {

using phi::DenseTensor;
using phi::distributed::DistTensor;
using phi::distributed::ProcessMesh;
using phi::distributed::TensorDistAttr;

int dim_on(const TensorDistAttr& attr, int axis) {
  const auto& all = attr.multi_dims_mapping();
  for (size_t dim = 0; dim < all.size(); ++dim) {
    for (auto each : all[dim]) {
      if (each == axis) return static_cast<int>(dim);
    }
  }
  return -1;
}

bool is_same(const TensorDistAttr& a, const TensorDistAttr& b, int axis) {
  return a.is_partial(axis) == b.is_partial(axis) && dim_on(a, axis) == dim_on(b, axis);
}

phi::DDim local_dims(phi::DDim dims, const TensorDistAttr& attr, const Coordinate& coordinate) {
  for (size_t axis = 0; axis < coordinate.size(); ++axis) {
    const int dim = dim_on(attr, static_cast<int>(axis));
    if (dim < 0) continue;
    const int64_t degree = attr.process_mesh().shape()[axis], size = dims[dim], most = (size + degree - 1) / degree;
    dims[dim] = std::max<int64_t>(0, std::min(most, size - coordinate[axis] * most));
  }
  return dims;
}

std::vector<int64_t> ranks_along(const ProcessMesh& mesh, Coordinate coordinate, int axis) {
  std::vector<int64_t> found;
  for (coordinate[axis] = 0; coordinate[axis] < mesh.shape()[axis]; ++coordinate[axis]) {
    int64_t flat = 0;
    for (int i = 0; i < mesh.ndim(); ++i) flat = flat * mesh.shape()[i] + coordinate[i];
    found.push_back(mesh.process_ids()[flat]);
  }
  return found;
}

bool Reshard::IsSuitable(const DistTensor& in, const TensorDistAttr& to) {
  // a tensor whose memory was freed, as a backward pass may need its shape only, has no place
  return (!in.value().has_allocation() || in.value().place().GetType() == phi::AllocationType::CUSTOM) &&
         in.dist_attr().process_mesh() == to.process_mesh();
}

void Reshard::Eval(phi::DeviceContext* context, const DistTensor& in, const TensorDistAttr& to, DistTensor* out) {
  const auto coordinate = phi::distributed::GetCurRankCoordInMesh(to.process_mesh());
  DenseTensor value = in.value();
  if (!value.initialized() && value.numel()) {
    auto meta = value.meta();
    meta.dims = local_dims(in.dims(), to, coordinate);
    meta.strides = phi::DenseTensorMeta::calc_strides(meta.dims);
    value = DenseTensor(value.Holder(), meta);
  } else {
    value = change(static_cast<phi::CustomContext*>(context), in, to, coordinate);
  }
  SetValue(out, value);
  SetDistProps(out, in.dims(), to);
}

void register_reshard(std::unique_ptr<Reshard> reshard) {
  auto& all = phi::distributed::GetReshardFunctionList();
  all.insert(all.begin(), std::move(reshard));
}

}  // namespace custom_device
