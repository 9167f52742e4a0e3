// Products of matrices by instructions for bfloat16, with float32 sums:
//   llmsuite_bf16_product   the sum of the products of pairs of matrices, each float32 (rounded here) or bfloat16
//                           -> float32, or rounded once to bfloat16; by blocks.h or the oneDNN in Paddle's wheel
//   llmsuite_split_product  the same of float32 matrices, of which nothing is rounded: in parts, by blocks.h
// They have no gradients of their own: see `llmsuite.models.products`. Those of llmsuite_bf16_linear and
// llmsuite_split_linear have, for programs.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <numeric>
#include <tuple>
#include <vector>

#include "blocks.h"
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

// Whether products are made by blocks.h: faster than oneDNN's where tiles.h has the registers of AMX. The macro is for
// tests on other processors.
bool UsesBlocks() {
#if defined(LLMSUITE_BLOCKS)
  return true;
#elif defined(__AMX_BF16__)
  return tiles::MayUseAmx();
#else
  return false;
#endif
}

// Leading dims are rows. Each a is [..., K], or with ta [..., M] of as many rows as b has; b [K, N], with tb [N, K].
struct Sides {
  Dims shape;
  int64_t m, n;
  std::vector<Tensor> a, b;
  std::vector<blocks::Pair> pairs;

  // `take(a)` is a as the product needs it.
  template <typename F>
  Sides(const std::vector<Tensor>& left, const std::vector<Tensor>& right, bool ta, bool tb, F take) {
    PD_CHECK(!left.empty() && left.size() == right.size(), "as many matrices are needed on the left as on the right");
    shape = Shape(left[0].shape(), right[0].shape(), ta, tb);
    n = shape.back();
    m = std::accumulate(shape.begin(), shape.end() - 1, int64_t{1}, std::multiplies<int64_t>());
    for (size_t i = 0; m * n && i < left.size(); ++i) {
      const int64_t wide = left[i].shape().back(), rows = wide ? left[i].numel() / wide : 0, k = ta ? rows : wide;
      const int64_t others = right[i].numel() / n;  // leading dims of both are rows, where a is transposed
      PD_CHECK(Shape(left[i].shape(), right[i].shape(), ta, tb) == shape && others == k,
               "matrices that do not fit: ", k, " and ", others, " are to be added up, or the outputs of pairs differ");
      if (k == 0) continue;
      a.push_back(take(left[i])), b.push_back(right[i]);
      pairs.push_back({Matrix(a.back(), wide, ta), Matrix(b.back(), tb ? k : n, tb), k});
    }
  }

 private:
  static blocks::Matrix Matrix(const Tensor& x, int64_t lead, bool is_turned) {
    return {x.data(), !rounding::IsBf16(x), lead, is_turned};
  }
};

// By oneDNN, one pair after the other.
void Add(const Sides& sides, Tensor& c, bool is_narrow) {
  static auto* matmuls = new Matmuls;
  const auto& pairs = sides.pairs;
  Tensor total = is_narrow && pairs.size() > 1 ? rounding::New(c.shape(), Type::FLOAT32, c) : c;
  for (size_t i = 0; i < pairs.size(); ++i) {
    const bool is_last = i + 1 == pairs.size();
    const float* addend = i ? total.data<float>() : nullptr;
    void* to = is_last ? c.data() : total.data();
    matmuls->Run({sides.m, pairs[i].k, sides.n, pairs[i].a.is_turned, pairs[i].b.is_turned, addend, to,
                  is_narrow && is_last},
                 sides.a[i], sides.b[i]);
  }
}

std::vector<Tensor> Product(const std::vector<Tensor>& a, const std::vector<Tensor>& b, bool ta, bool tb,
                            bool is_narrow) {
  // oneDNN's have a room of their own, in which what is float32 is rounded
  const Sides sides(a, b, ta, tb, [](const Tensor& x) { return UsesBlocks() ? rounding::ToBf16(x) : x; });
  Tensor c = rounding::New(sides.shape, is_narrow ? Type::BFLOAT16 : Type::FLOAT32, a[0]);
  if (c.numel() == 0) return {c};
  if (sides.pairs.empty())
    std::memset(c.data(), 0, c.numel() * (is_narrow ? 2 : 4));
  else if (UsesBlocks())
    blocks::Multiply<1>(sides.m, sides.n, sides.pairs, {c.data(), !is_narrow});
  else
    Add(sides, c, is_narrow);
  return {c};
}

std::vector<Tensor> SplitProduct(const std::vector<Tensor>& a, const std::vector<Tensor>& b, bool ta, bool tb) {
  const Sides sides(a, b, ta, tb, [](const Tensor& x) { return x; });
  for (const blocks::Pair& pair : sides.pairs)
    PD_CHECK(pair.a.is_float && pair.b.is_float, "float32 matrices are needed");
  Tensor c = rounding::New(sides.shape, Type::FLOAT32, a[0]);
  if (c.numel() == 0) return {c};
  if (sides.pairs.empty())
    std::memset(c.data(), 0, c.numel() * 4);
  else
    blocks::Multiply<3>(sides.m, sides.n, sides.pairs, {c.data(), true});
  return {c};
}

Tensor Multiply(const Tensor& a, const Tensor& b, bool ta, bool tb, bool is_narrow) {
  return Product({a}, {b}, ta, tb, is_narrow)[0];
}
std::vector<Tensor> LinearForward(const Tensor& x, const Tensor& w, bool transpose, bool takes, bool gives) {
  return linear::Forward(x, w, transpose, gives, Multiply);
}
std::vector<Tensor> LinearBackward(const Tensor& kept, const Tensor& w, const Tensor& d_y, bool transpose, bool takes,
                                   bool gives) {
  return linear::Backward(kept, w, d_y, transpose, takes, Multiply);
}

Tensor MultiplyParts(const Tensor& a, const Tensor& b, bool ta, bool tb) {
  return SplitProduct({a}, {b}, ta, tb)[0];
}
std::vector<Tensor> SplitLinear(const Tensor& x, const Tensor& w, bool transpose) {
  return {MultiplyParts(x, w, false, transpose)};
}
std::vector<Tensor> SplitLinearBackward(const Tensor& x, const Tensor& w, const Tensor& given, bool transpose) {
  const Tensor d_y = given.contiguous();
  return {MultiplyParts(d_y, w, false, !transpose), transpose ? MultiplyParts(d_y, x, true, false)
                                                              : MultiplyParts(x, d_y, true, false)};
}
std::vector<Dims> LinearShape(const Dims& x, const Dims& w, bool transpose) { return {Shape(x, w, false, transpose)}; }
std::vector<Type> LinearType(const Type&, const Type&, bool) { return {Type::FLOAT32}; }
std::vector<Dims> LinearGradShapes(const Dims& x, const Dims& w, const Dims&, bool) { return {x, w}; }
std::vector<Type> LinearGradTypes(const Type&, const Type&, const Type&, bool) {
  return {Type::FLOAT32, Type::FLOAT32};
}

std::vector<Dims> SplitShapes(const std::vector<Dims>& a, const std::vector<Dims>& b, bool ta, bool tb) {
  return {Shape(a[0], b[0], ta, tb)};
}
std::vector<Type> SplitTypes(const std::vector<Type>&, const std::vector<Type>&, bool, bool) { return {Type::FLOAT32}; }
std::vector<Dims> ProductShapes(const std::vector<Dims>& a, const std::vector<Dims>& b, bool ta, bool tb, bool) {
  return {Shape(a[0], b[0], ta, tb)};
}
std::vector<Type> ProductTypes(const std::vector<Type>&, const std::vector<Type>&, bool, bool, bool is_narrow) {
  return {is_narrow ? Type::BFLOAT16 : Type::FLOAT32};
}

}  // namespace

PD_BUILD_OP(llmsuite_bf16_product)
    .Inputs({paddle::Vec("a"), paddle::Vec("b")}).Outputs({"c"})
    .Attrs({"transpose_a: bool", "transpose_b: bool", "is_narrow: bool"})
    .SetKernelFn(PD_KERNEL(Product)).SetInferShapeFn(PD_INFER_SHAPE(ProductShapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(ProductTypes));

LLMSUITE_LINEAR(llmsuite_bf16_linear, LinearForward, LinearBackward);

PD_BUILD_OP(llmsuite_split_product)
    .Inputs({paddle::Vec("a"), paddle::Vec("b")}).Outputs({"c"}).Attrs({"transpose_a: bool", "transpose_b: bool"})
    .SetKernelFn(PD_KERNEL(SplitProduct)).SetInferShapeFn(PD_INFER_SHAPE(SplitShapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(SplitTypes));

PD_BUILD_OP(llmsuite_split_linear)
    .Inputs({"x", "w"}).Outputs({"y"}).Attrs({"transpose: bool"}).SetKernelFn(PD_KERNEL(SplitLinear))
    .SetInferShapeFn(PD_INFER_SHAPE(LinearShape)).SetInferDtypeFn(PD_INFER_DTYPE(LinearType));
PD_BUILD_GRAD_OP(llmsuite_split_linear)
    .Inputs({"x", "w", paddle::Grad("y")}).Outputs({paddle::Grad("x"), paddle::Grad("w")})
    .Attrs({"transpose: bool"}).SetKernelFn(PD_KERNEL(SplitLinearBackward))
    .SetInferShapeFn(PD_INFER_SHAPE(LinearGradShapes)).SetInferDtypeFn(PD_INFER_DTYPE(LinearGradTypes));
