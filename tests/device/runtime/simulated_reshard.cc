#include "simulated_reshard.h"

#include <algorithm>
#include <cstring>

#include "collectives.h"
#include "memory.h"
#include "paddle/phi/backends/custom/custom_context.h"
#include "paddle/phi/core/distributed/auto_parallel/reshard/reshard_utils.h"
#include "paddle/phi/core/distributed/xccl_comm_context.h"
#include "reshard.h"
#include "streams.h"

namespace sim {
namespace {

using phi::DenseTensor;
using custom_device::Coordinate;
using custom_device::dim_on;
using custom_device::is_same;
using custom_device::ranks_along;
using phi::distributed::DistTensor;
using phi::distributed::TensorDistAttr;

// A tensor as [outer, size of the dim, bytes of all dims after it].
struct Layout {
  size_t outer = 1, inner_bytes;
  Layout(const phi::DDim& dims, int dim, phi::DataType type) : inner_bytes(phi::SizeOf(type)) {
    for (int i = 0; i < dim; ++i) outer *= dims[i];
    for (int i = dim + 1; i < dims.size(); ++i) inner_bytes *= dims[i];
  }
};

size_t num_bytes(const DenseTensor& tensor) { return tensor.numel() * phi::SizeOf(tensor.dtype()); }

Span span_of(const DenseTensor& tensor) { return {tensor.data(), num_bytes(tensor)}; }

C_DataType type_of(phi::DataType type) {
  switch (type) {
    case phi::DataType::FLOAT32:
      return FLOAT32;
    case phi::DataType::BFLOAT16:
      return BFLOAT16;
    case phi::DataType::FLOAT16:
      return FLOAT16;
    case phi::DataType::FLOAT64:
      return FLOAT64;
    case phi::DataType::INT32:
      return INT32;
    case phi::DataType::INT64:
      return INT64;
    default:
      return phi::SizeOf(type) == 1 ? UINT8 : INT64;
  }
}

C_CCLReduceOp reduction_of(phi::ReduceType type) {
  switch (type) {
    case phi::ReduceType::kRedMax:
      return MAX;
    case phi::ReduceType::kRedMin:
      return MIN;
    case phi::ReduceType::kRedAvg:
      return AVG;
    default:
      return SUM;
  }
}

// Steps of one reshard, on the stream of its context.
class Steps {
 public:
  explicit Steps(phi::CustomContext* device) : device_(device) {}

  DenseTensor sum(const DenseTensor& part, const std::vector<int64_t>& ranks, phi::ReduceType how) {
    auto whole = make(part.dims(), part.dtype());
    all_reduce(part.data(), whole.data(), part.numel(), type_of(part.dtype()), reduction_of(how), comm(ranks), stream());
    return whole;
  }

  // Parts may be of different sizes, the last ones empty.
  DenseTensor gather(const DenseTensor& part, const std::vector<int64_t>& ranks, int dim, size_t whole_size) {
    auto dims = part.dims();
    const Layout layout(dims, dim, part.dtype());
    const size_t own = dims[dim], most = (whole_size + ranks.size() - 1) / ranks.size();
    const size_t room = layout.outer * most * layout.inner_bytes, own_bytes = layout.outer * own * layout.inner_bytes;
    auto padded = make(phi::make_ddim({static_cast<int64_t>(room)}), phi::DataType::UINT8);
    auto all = make(phi::make_ddim({static_cast<int64_t>(room * ranks.size())}), phi::DataType::UINT8);
    dims[dim] = whole_size;
    auto whole = make(dims, part.dtype());
    Access copy{"reshard", {}, {span_of(padded)}};
    if (own_bytes) copy.reads.push_back(span_of(part));
    put(copy, [to = inner(padded.data()), from = own_bytes ? inner(part.data()) : nullptr, own_bytes] {
      if (from) std::memcpy(to, from, own_bytes);
    });
    all_gather(padded.data(), all.data(), room, UINT8, comm(ranks), stream());
    const size_t num_ranks = ranks.size();
    auto* to = static_cast<char*>(inner(whole.data()));
    auto* from = static_cast<char*>(inner(all.data()));
    put({"reshard", {span_of(all)}, {span_of(whole)}}, [=] {
      for (size_t rank = 0, start = 0; rank < num_ranks; ++rank) {
        const size_t size = std::min<size_t>(most, whole_size - start);
        for (size_t outer = 0; outer < layout.outer; ++outer) {
          std::memcpy(to + (outer * whole_size + start) * layout.inner_bytes,
                      from + rank * room + outer * size * layout.inner_bytes, size * layout.inner_bytes);
        }
        start += size;
      }
    });
    return whole;
  }

  DenseTensor cut(const DenseTensor& whole, int dim, size_t index, size_t degree) {
    auto dims = whole.dims();
    const Layout layout(dims, dim, whole.dtype());
    const size_t whole_size = dims[dim], most = (whole_size + degree - 1) / degree, start = index * most;
    const size_t size = start < whole_size ? std::min(most, whole_size - start) : 0;
    dims[dim] = size;
    auto part = make(dims, whole.dtype());
    if (!size) return part;
    auto* to = static_cast<char*>(inner(part.data()));
    auto* from = static_cast<const char*>(inner(whole.data()));
    put({"reshard", {span_of(whole)}, {span_of(part)}}, [=] {
      for (size_t outer = 0; outer < layout.outer; ++outer) {
        std::memcpy(to + outer * size * layout.inner_bytes, from + (outer * whole_size + start) * layout.inner_bytes,
                    size * layout.inner_bytes);
      }
    });
    return part;
  }

  DenseTensor zeros(const DenseTensor& like) {
    auto tensor = make(like.dims(), like.dtype());
    put({"reshard", {}, {span_of(tensor)}},
        [to = inner(tensor.data()), size = num_bytes(tensor)] { std::memset(to, 0, size); });
    return tensor;
  }

 private:
  DenseTensor make(const phi::DDim& dims, phi::DataType type) {
    DenseTensor tensor;
    tensor.Resize(dims);
    device_->Alloc(&tensor, type);
    return tensor;
  }

  C_Stream stream() const { return reinterpret_cast<C_Stream>(device_->stream()); }

  void put(const Access& access, std::function<void()> work) { stream_of(stream())->put(access, std::move(work)); }

  C_CCLComm comm(const std::vector<int64_t>& ranks) {
    auto* found = phi::distributed::CreateOrGetCommContext(*device_, ranks);
    return reinterpret_cast<C_CCLComm>(static_cast<phi::distributed::XCCLCommContext*>(found)->GetXcclComm());
  }

  phi::CustomContext* device_;
};

// Makes a tensor whole along each axis of the mesh on which its placement changes, then cuts it anew.
class OnDevice final : public custom_device::Reshard {
 public:
  std::string Name() override { return "Simulated"; }

 protected:
  DenseTensor change(phi::CustomContext* device, const DistTensor& in, const TensorDistAttr& to,
                     const Coordinate& coordinate) override {
    Steps steps(device);
    return cut(&steps, whole(&steps, in.value(), in, to, coordinate), in, to, coordinate);
  }

 private:
  static DenseTensor whole(Steps* steps, DenseTensor value, const DistTensor& in, const TensorDistAttr& to,
                           const Coordinate& coordinate) {
    const auto& from = in.dist_attr();
    const auto& mesh = to.process_mesh();
    for (int axis = mesh.ndim() - 1; axis >= 0; --axis) {
      if (is_same(from, to, axis)) continue;
      const auto ranks = ranks_along(mesh, coordinate, axis);
      if (from.is_partial(axis)) value = steps->sum(value, ranks, from.partial_status().at(axis));
      const int dim = dim_on(from, axis);
      if (dim < 0) continue;
      const bool is_only_axis = from.multi_dims_mapping()[dim].size() == 1;
      value = steps->gather(value, ranks, dim, is_only_axis ? in.dims()[dim] : value.dims()[dim] * mesh.shape()[axis]);
    }
    return value;
  }

  static DenseTensor cut(Steps* steps, DenseTensor value, const DistTensor& in, const TensorDistAttr& to,
                         const Coordinate& coordinate) {
    const auto& mesh = to.process_mesh();
    for (int axis = 0; axis < mesh.ndim(); ++axis) {
      if (is_same(in.dist_attr(), to, axis)) continue;
      const int dim = dim_on(to, axis);
      if (dim >= 0) value = steps->cut(value, dim, coordinate[axis], mesh.shape()[axis]);
      if (to.is_partial(axis) && coordinate[axis] != 0) value = steps->zeros(value);
    }
    return value;
  }
};

}  // namespace

void register_reshard() { custom_device::register_reshard(std::make_unique<OnDevice>()); }

}  // namespace sim
