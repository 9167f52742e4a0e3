#include "virtual_reshard.h"

#include <string>
#include <utility>

#include "records.h"
#include "reshard.h"
#include "settings.h"

namespace rehearse {
namespace {

using custom_device::Coordinate;
using phi::DenseTensor;
using phi::distributed::DistTensor;
using phi::distributed::TensorDistAttr;

double num_bytes(const DenseTensor& tensor) { return double(tensor.numel()) * phi::SizeOf(tensor.dtype()); }

// On meshes of several dims one axis may change.
int changed_axis(const TensorDistAttr& from, const TensorDistAttr& to) {
  int found = -1;
  for (int axis = 0; axis < to.process_mesh().ndim(); ++axis) {
    if (custom_device::is_same(from, to, axis)) continue;
    if (found >= 0) PADDLE_THROW(common::errors::Unimplemented("rehearse: placements on two axes of a mesh change"));
    found = axis;
  }
  return found;
}

class VirtualReshard final : public custom_device::Reshard {
 public:
  std::string Name() override { return "Virtual"; }

 protected:
  DenseTensor change(phi::CustomContext* device, const DistTensor& in, const TensorDistAttr& to,
                     const Coordinate& coordinate) override {
    const auto& from = in.dist_attr();
    const int axis = changed_axis(from, to);
    if (axis < 0) return in.value();
    const auto ranks = custom_device::ranks_along(to.process_mesh(), coordinate, axis);
    const auto* stream = stream_of(device->stream());
    const int before = custom_device::dim_on(from, axis), after = custom_device::dim_on(to, axis);
    const auto& value = in.value();
    const DenseTensor made = make(device, custom_device::local_dims(in.dims(), to, coordinate), value.dtype());
    auto send = [&](const char* name, double bytes) {
      Work work;
      work.bytes = bytes;
      work.about = ranks.size();
      for (auto rank : ranks) work.group += (work.group.empty() ? "ranks " : ",") + std::to_string(rank);
      note(What::message, stream, name, work);
    };
    auto copy = [&](double bytes) {
      Work work;
      work.bytes = 2 * bytes;
      note(What::kernel, stream, "reshard", work);
    };
    if (from.is_partial(axis) && after < 0) {
      send("all_reduce", num_bytes(value));
    } else if (from.is_partial(axis)) {
      if (after > 0) rearranged(device, value, copy);
      send("reduce_scatter", num_bytes(value));
    } else if (before >= 0 && after < 0) {
      send("all_gather", num_bytes(made));
      if (before > 0) rearranged(device, made, copy);
    } else if (before >= 0) {
      send("all_to_all", num_bytes(value));
      rearranged(device, value, copy);
    } else {
      copy(num_bytes(made));
    }
    keep_values(value, made);
    return made;
  }

 private:
  static DenseTensor make(phi::CustomContext* device, const phi::DDim& dims, phi::DataType type) {
    DenseTensor tensor;
    tensor.Resize(dims);
    device->Alloc(&tensor, type);
    if (tensor.has_allocation()) note_allocation(tensor, "reshard");
    return tensor;
  }

  // Messages are along the first dim: for another one a copy of the tensor is made, with its parts one after another.
  template <typename Copy>
  static void rearranged(phi::CustomContext* device, const DenseTensor& tensor, Copy copy) {
    const DenseTensor other = make(device, tensor.dims(), tensor.dtype());
    copy(num_bytes(other));
  }

  static void keep_values(const DenseTensor& from, const DenseTensor& to) {
    if (!to.numel() || num_bytes(to) > kSmall) return;
    if (from.numel() == to.numel()) {
      std::memcpy(const_cast<void*>(to.data()), from.data(), num_bytes(to));
    } else {
      std::memset(const_cast<void*>(to.data()), 0, num_bytes(to));
    }
  }
};

}  // namespace

void register_reshard() { custom_device::register_reshard(std::make_unique<VirtualReshard>()); }

}  // namespace rehearse
