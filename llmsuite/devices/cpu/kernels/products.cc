// Products of float32 matrices with bfloat16 inputs and float32 sums, by the oneDNN in Paddle's wheel:
//   llmsuite_bf16_product       two matrices, each float32 (rounded here) or bfloat16 -> float32, or bfloat16
//   llmsuite_bf16_product_plus  the same plus a float32 matrix: in place, or rounded once, with the sum, to bfloat16
// They have no gradients of their own: see `llmsuite.models.products`.
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

// c [m, n] = x [m, k] y [k, n] + addend [m, n]
struct Sum {
  int64_t m, k, n;
  bool ta, tb;  // whether what is stored of x and y is the transpose
  const float* addend;  // null for none; c itself to add in place
  void* c;
  bool is_narrow;  // whether c is bfloat16, to which sums are rounded once; else it is float32
};

struct Matmul {
  dnnl_memory_t a, b, c, addend;
  dnnl_primitive_t primitive;
};

class Matmuls {  // by shape; a primitive takes 0.4 ms to make and 260 KB
 public:
  void Run(const Sum& sum, const Tensor& x, const Tensor& y) {
    std::lock_guard<std::mutex> hold(lock_);
    const uint16_t *a = rounding::ToBf16(x, left_), *b = rounding::ToBf16(y, right_);
    const Adds adds = sum.addend == nullptr ? kNothing : sum.addend == sum.c ? kInPlace : kAddend;
    Matmul& found = Find({sum.m, sum.k, sum.n, sum.ta, sum.tb, sum.is_narrow, adds});
    std::vector<dnnl_exec_arg_t> args = {
        {DNNL_ARG_SRC, found.a}, {DNNL_ARG_WEIGHTS, found.b}, {DNNL_ARG_DST, found.c}};
    std::vector<const void*> data = {a, b, sum.c};
    if (adds == kAddend) args.push_back({DNNL_ARG_FIRST_ADDEND, found.addend}), data.push_back(sum.addend);
    for (size_t i = 0; i < args.size(); ++i)
      Check(dnnl_memory_set_data_handle(args[i].memory, const_cast<void*>(data[i])), "take a matrix");
    Check(dnnl_primitive_execute(found.primitive, stream_, args.size(), args.data()), "multiply");
    Check(dnnl_stream_wait(stream_), "multiply");
  }

 private:
  enum Adds { kNothing, kInPlace, kAddend };
  using Key = std::tuple<int64_t, int64_t, int64_t, bool, bool, bool, Adds>;  // as in Sum, from m to is_narrow
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
      for (dnnl_memory_t memory : {oldest.a, oldest.b, oldest.c, oldest.addend})
        if (memory != nullptr) dnnl_memory_destroy(memory);
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
    auto [m, k, n, ta, tb, is_narrow, adds] = key;
    dnnl_memory_desc_t a = Describe(m, k, dnnl_bf16, ta), b = Describe(k, n, dnnl_bf16, tb);
    // its transpose would fall to a reference loop
    dnnl_memory_desc_t c = Describe(m, n, is_narrow ? dnnl_bf16 : dnnl_f32, false);
    dnnl_memory_desc_t addend = adds == kAddend ? Describe(m, n, dnnl_f32, false) : nullptr;
    dnnl_post_ops_t further = nullptr;
    dnnl_primitive_attr_t attributes = nullptr;
    Check(dnnl_post_ops_create(&further), "describe a sum");
    Check(dnnl_primitive_attr_create(&attributes), "describe a sum");
    if (adds == kInPlace) Check(dnnl_post_ops_append_sum(further, 1.f, 0, dnnl_data_type_undef), "add in place");
    if (adds == kAddend) Check(dnnl_post_ops_append_binary(further, dnnl_binary_add, addend), "add");
    Check(dnnl_primitive_attr_set_post_ops(attributes, further), "describe a sum");
    dnnl_primitive_desc_t description = nullptr;
    Matmul made;
    Check(dnnl_matmul_primitive_desc_create(&description, engine_, a, b, nullptr, c, attributes),
          "multiply in bfloat16 on this processor");
    Check(dnnl_primitive_create(&made.primitive, description), "generate the code of a product");
    const auto memory = [&](dnnl_memory_desc_t of) {
      dnnl_memory_t found = nullptr;
      if (of != nullptr) Check(dnnl_memory_create(&found, of, engine_, nullptr), "describe a matrix");
      return found;
    };
    made.a = memory(a), made.b = memory(b), made.c = memory(c), made.addend = memory(addend);
    dnnl_primitive_desc_destroy(description);
    dnnl_primitive_attr_destroy(attributes);
    dnnl_post_ops_destroy(further);
    for (dnnl_memory_desc_t one : {a, b, c, addend})
      if (one != nullptr) dnnl_memory_desc_destroy(one);
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

// Leading dims are rows. a [..., K], or with ta [..., M] of as many rows as b has; b [K, N], with tb [N, K]. The addend
// is float32, of the shape of the product, and becomes it where that is float32 too.
Tensor Multiply(const Tensor& a, const Tensor& b, bool ta, bool tb, bool is_narrow, const Tensor* addend) {
  const int64_t wide = a.shape().back(), rows = wide ? a.numel() / wide : 0;
  const int64_t n = tb ? b.shape().front() : b.shape().back(), others = n ? b.numel() / n : 0;
  const int64_t m = ta ? wide : rows, k = ta ? rows : wide;
  PD_CHECK(k == others, "matrices that do not fit: ", k, " and ", others);
  const Dims shape = Shape(a.shape(), b.shape(), ta, tb);
  const bool in_place = addend != nullptr && !is_narrow;
  PD_CHECK(addend == nullptr || (addend->shape() == shape && !rounding::IsBf16(*addend)), "what is added does not fit");
  Tensor c = in_place ? Tensor(addend->impl()) : rounding::New(shape, is_narrow ? Type::BFLOAT16 : Type::FLOAT32, a);
  if (c.numel() == 0) return c;
  const float* added = addend == nullptr ? nullptr : addend->data<float>();
  if (k > 0) {
    static auto* matmuls = new Matmuls;
    matmuls->Run({m, k, n, ta, tb, added, c.data(), is_narrow}, a, b);
  } else if (added == nullptr) {
    std::memset(c.data(), 0, c.numel() * (is_narrow ? 2 : 4));
  } else if (is_narrow) {
    rounding::Each(added, static_cast<uint16_t*>(c.data()), c.numel(), [](float x) { return rounding::Half(x); });
  }
  return c;
}

std::vector<Tensor> Product(const Tensor& a, const Tensor& b, bool ta, bool tb, bool is_narrow) {
  return {Multiply(a, b, ta, tb, is_narrow, nullptr)};
}
std::vector<Tensor> ProductPlus(const Tensor& a, const Tensor& b, const Tensor& addend, bool ta, bool tb,
                                bool is_narrow) {
  return {Multiply(a, b, ta, tb, is_narrow, &addend)};
}

Tensor PlainMultiply(const Tensor& a, const Tensor& b, bool ta, bool tb, bool is_narrow) {
  return Multiply(a, b, ta, tb, is_narrow, nullptr);
}
std::vector<Tensor> LinearForward(const Tensor& x, const Tensor& w, bool transpose, bool takes, bool gives) {
  return linear::Forward(x, w, transpose, gives, PlainMultiply);
}
std::vector<Tensor> LinearBackward(const Tensor& kept, const Tensor& w, const Tensor& d_y, bool transpose, bool takes,
                                   bool gives) {
  return linear::Backward(kept, w, d_y, transpose, takes, PlainMultiply);
}

std::vector<Dims> ProductShapes(const Dims& a, const Dims& b, bool ta, bool tb, bool) { return {Shape(a, b, ta, tb)}; }
std::vector<Type> ProductTypes(const Type&, const Type&, bool, bool, bool is_narrow) {
  return {is_narrow ? Type::BFLOAT16 : Type::FLOAT32};
}
std::vector<Dims> PlusShapes(const Dims&, const Dims&, const Dims& addend, bool, bool, bool) { return {addend}; }
std::vector<Type> PlusTypes(const Type&, const Type&, const Type&, bool, bool, bool is_narrow) {
  return {is_narrow ? Type::BFLOAT16 : Type::FLOAT32};
}

}  // namespace

PD_BUILD_OP(llmsuite_bf16_product)
    .Inputs({"a", "b"}).Outputs({"c"}).Attrs({"transpose_a: bool", "transpose_b: bool", "is_narrow: bool"})
    .SetKernelFn(PD_KERNEL(Product)).SetInferShapeFn(PD_INFER_SHAPE(ProductShapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(ProductTypes));
PD_BUILD_OP(llmsuite_bf16_product_plus)
    .Inputs({"a", "b", "addend"}).Outputs({"c"})
    .Attrs({"transpose_a: bool", "transpose_b: bool", "is_narrow: bool"})
    .SetKernelFn(PD_KERNEL(ProductPlus)).SetInferShapeFn(PD_INFER_SHAPE(PlusShapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(PlusTypes));

LLMSUITE_LINEAR(llmsuite_bf16_linear, LinearForward, LinearBackward);
