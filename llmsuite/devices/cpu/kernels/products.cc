// Products of float32 matrices with bfloat16 inputs and float32 sums, by the oneDNN in Paddle's wheel:
//   llmsuite_bf16_product  two matrices, each float32 (rounded here) or bfloat16 -> float32
// It has no gradient of its own: see `llmsuite.models.products`.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

#include "onednn.h"
#include "paddle/phi/api/ext/op_meta_info.h"
#include "paddle/phi/api/include/api.h"
#include "paddle/phi/api/include/tensor.h"
#include "linear.h"
#include "rounding.h"

using Tensor = paddle::Tensor;
using Type = paddle::DataType;
using Dims = std::vector<int64_t>;

namespace {

void Check(dnnl_status_t status, const char* what) {
  PD_CHECK(status == dnnl_success, "oneDNN cannot ", what, " (status ", int(status), ")");
}

struct Matmul {
  dnnl_memory_t a, b, c;
  dnnl_primitive_t primitive;
};

class Matmuls {  // by shape; a primitive takes 0.4 ms to make and 260 KB
 public:
  // c [m, n] = x [m, k] y [k, n], where what is stored of x and y may be the transpose
  void Run(int64_t m, int64_t k, int64_t n, bool ta, bool tb, const Tensor& x, const Tensor& y, void* c) {
    std::lock_guard<std::mutex> hold(lock_);
    const uint16_t *a = rounding::ToBf16(x, left_), *b = rounding::ToBf16(y, right_);
    Matmul& found = Find({m, k, n, ta, tb});
    Check(dnnl_memory_set_data_handle(found.a, const_cast<uint16_t*>(a)), "take a matrix");
    Check(dnnl_memory_set_data_handle(found.b, const_cast<uint16_t*>(b)), "take a matrix");
    Check(dnnl_memory_set_data_handle(found.c, c), "take a matrix");
    const dnnl_exec_arg_t args[] = {{DNNL_ARG_SRC, found.a}, {DNNL_ARG_WEIGHTS, found.b}, {DNNL_ARG_DST, found.c}};
    Check(dnnl_primitive_execute(found.primitive, stream_, 3, args), "multiply");
    Check(dnnl_stream_wait(stream_), "multiply");
  }

 private:
  using Key = std::tuple<int64_t, int64_t, int64_t, bool, bool>;
  // The number of rows differs from batch to batch, and each brings some 15 shapes: 6 ms. Of the shapes of the last
  // steps most come again. So the oldest are forgotten: 128 take 33 MB.
  static constexpr size_t kMost = 128;

  Matmul& Find(const Key& key) {
    if (engine_ == nullptr) Start();
    auto at = places_.find(key);
    if (at != places_.end()) {
      order_.splice(order_.begin(), order_, at->second);
      return order_.front().second;
    }
    if (order_.size() == kMost) {
      Matmul& oldest = order_.back().second;
      dnnl_primitive_destroy(oldest.primitive);
      for (dnnl_memory_t memory : {oldest.a, oldest.b, oldest.c}) dnnl_memory_destroy(memory);
      places_.erase(order_.back().first);
      order_.pop_back();
    }
    order_.emplace_front(key, Make(key));
    places_[key] = order_.begin();
    return order_.front().second;
  }

  void Start() {
    const dnnl_version_t* version = dnnl_version();
    PD_CHECK(version->major == 3, "the oneDNN of this Paddle is ", version->major, ".", version->minor, ", not 3");
    Check(dnnl_set_primitive_cache_capacity(1), "forget");  // it has one of its own, of 1024
    Check(dnnl_engine_create(&engine_, dnnl_cpu, 0), "start");
    Check(dnnl_stream_create(&stream_, engine_, dnnl_stream_in_order), "start");
  }

  Matmul Make(const Key& key) {
    auto [m, k, n, ta, tb] = key;
    dnnl_memory_desc_t a = Describe(m, k, dnnl_bf16, ta), b = Describe(k, n, dnnl_bf16, tb);
    dnnl_memory_desc_t c = Describe(m, n, dnnl_f32, false);  // its transpose would fall to a reference loop
    dnnl_primitive_desc_t description = nullptr;
    Matmul made;
    Check(dnnl_matmul_primitive_desc_create(&description, engine_, a, b, nullptr, c, nullptr),
          "multiply in bfloat16 on this processor");
    Check(dnnl_primitive_create(&made.primitive, description), "generate the code of a product");
    Check(dnnl_memory_create(&made.a, a, engine_, nullptr), "describe a matrix");
    Check(dnnl_memory_create(&made.b, b, engine_, nullptr), "describe a matrix");
    Check(dnnl_memory_create(&made.c, c, engine_, nullptr), "describe a matrix");
    dnnl_primitive_desc_destroy(description);
    for (dnnl_memory_desc_t one : {a, b, c}) dnnl_memory_desc_destroy(one);
    return made;
  }

  static dnnl_memory_desc_t Describe(int64_t rows, int64_t columns, dnnl_data_type_t type, bool is_transposed) {
    const dnnl_dims_t dims = {rows, columns}, plain = {columns, 1}, transposed = {1, rows};
    dnnl_memory_desc_t found = nullptr;
    Check(dnnl_memory_desc_create_with_strides(&found, 2, dims, type, is_transposed ? transposed : plain),
          "describe a matrix");
    return found;
  }

  std::mutex lock_;
  rounding::Room left_, right_;
  dnnl_engine_t engine_ = nullptr;
  dnnl_stream_t stream_ = nullptr;
  std::list<std::pair<Key, Matmul>> order_;  // the one used last in front
  std::map<Key, std::list<std::pair<Key, Matmul>>::iterator> places_;
};

Dims Shape(const Dims& a, const Dims& b, bool ta, bool tb) {
  Dims shape = ta ? Dims{a.back(), 0} : a;
  shape.back() = tb ? b.front() : b.back();
  return shape;
}

// Leading dims are rows. a [..., K], or with ta [..., M] of as many rows as b has; b [K, N], with tb [N, K].
std::vector<Tensor> Product(const Tensor& a, const Tensor& b, bool ta, bool tb) {
  const int64_t wide = a.shape().back(), rows = wide ? a.numel() / wide : 0;
  const int64_t n = tb ? b.shape().front() : b.shape().back(), others = n ? b.numel() / n : 0;
  const int64_t m = ta ? wide : rows, k = ta ? rows : wide;
  PD_CHECK(k == others, "matrices that do not fit: ", k, " and ", others);
  Tensor c = rounding::New(Shape(a.shape(), b.shape(), ta, tb), Type::FLOAT32, a);
  if (c.numel() == 0) return {c};
  if (k == 0) {
    std::fill_n(c.data<float>(), c.numel(), 0.f);
    return {c};
  }
  static auto* matmuls = new Matmuls;
  matmuls->Run(m, k, n, ta, tb, a, b, c.data());
  return {c};
}

Tensor Multiply(const Tensor& a, const Tensor& b, bool ta, bool tb) { return Product(a, b, ta, tb)[0]; }

std::vector<Tensor> LinearForward(const Tensor& x, const Tensor& w, bool transpose) {
  return linear::Forward(x, w, transpose, Multiply);
}
std::vector<Tensor> LinearBackward(const Tensor& kept, const Tensor& w, const Tensor& d_y, bool transpose) {
  return linear::Backward(kept, w, d_y, transpose, Multiply);
}

std::vector<Dims> ProductShapes(const Dims& a, const Dims& b, bool ta, bool tb) { return {Shape(a, b, ta, tb)}; }
std::vector<Type> ProductTypes(const Type&, const Type&) { return {Type::FLOAT32}; }

}  // namespace

PD_BUILD_OP(llmsuite_bf16_product)
    .Inputs({"a", "b"}).Outputs({"c"}).Attrs({"transpose_a: bool", "transpose_b: bool"})
    .SetKernelFn(PD_KERNEL(Product)).SetInferShapeFn(PD_INFER_SHAPE(ProductShapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(ProductTypes));

LLMSUITE_LINEAR(llmsuite_bf16_linear, LinearForward, LinearBackward);
