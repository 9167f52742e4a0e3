// Tokens to rows that are sorted by expert, and the weighted sums of a token's rows: as operators, for programs, in which
// the numbers of rows are known to no Python. Rows of experts that are elsewhere are the last; they are zeros.
//
// Shapes: T tokens of D numbers, k experts of each; order and places [T k], int64: the place of each sorted row among all,
// token by token, and where each of these is among the sorted ones; counts [E], int64: rows of each expert.
#include <algorithm>

#include "common.h"

namespace {

using Dims = std::vector<int64_t>;
using Type = paddle::DataType;

const int64_t* Numbers(const Tensor& x, int64_t size, const char* name) {
  PD_CHECK(x.dtype() == Type::INT64 && x.is_contiguous() && x.numel() == size, name, ": int64, another size, or gaps");
  return x.data<int64_t>();
}

struct Route {
  int64_t rows, chosen, used = 0;
  const int64_t *order, *places;
  Route(const Tensor& order, const Tensor& places, const Tensor& counts, int64_t tokens)
      : rows(order.numel()), chosen(tokens ? rows / tokens : 0), order(Numbers(order, rows, "order")),
        places(Numbers(places, rows, "places")) {
    const int64_t* of = Numbers(counts, counts.numel(), "counts");
    for (int64_t i = 0; i < counts.numel(); used += of[i], ++i)
      PD_CHECK(of[i] >= 0 && of[i] <= rows - used, "counts are of more rows than there are");
    PD_CHECK(chosen * tokens == rows, "each token has to have as many rows");
    for (int64_t i = 0; i < rows; ++i)
      PD_CHECK(0 <= this->order[i] && this->order[i] < rows && 0 <= this->places[i] && this->places[i] < rows,
               "a row is beyond the last one");
  }
};

// y [T, D]: the sum of each token's rows [T k, D], times weights [T, k] where there are any
Tensor Sum(const Route& route, const Tensor& rows, const float* weights, int64_t tokens) {
  const int64_t size = rows.shape()[1];
  Tensor y = Floats({tokens, size}, rows);
  const float* from = rows.data<float>();
  float* to = y.data<float>();
#pragma omp parallel for
  for (int64_t t = 0; t < tokens; ++t) {
    float* sum = to + t * size;
    std::fill_n(sum, size, 0.f);
    for (int64_t i = t * route.chosen; i < (t + 1) * route.chosen; ++i) {
      if (route.places[i] >= route.used) continue;
      const float* row = from + route.places[i] * size;
      const float weight = weights ? weights[i] : 1.f;
#pragma omp simd
      for (int64_t j = 0; j < size; ++j) sum[j] += weight * row[j];
    }
  }
  return y;
}

// rows [T k, D]: those of tokens [T, D], times weights [T, k] where there are any
Tensor Spread(const Route& route, const Tensor& tokens, const float* weights) {
  const int64_t size = tokens.shape()[1];
  Tensor y = Floats({route.rows, size}, tokens);
  const float* from = tokens.data<float>();
  float* to = y.data<float>();
#pragma omp parallel for
  for (int64_t i = 0; i < route.used; ++i) {
    const float* token = from + route.order[i] / route.chosen * size;
    const float weight = weights ? weights[route.order[i]] : 1.f;
#pragma omp simd
    for (int64_t j = 0; j < size; ++j) to[i * size + j] = weight * token[j];
  }
  std::fill(to + route.used * size, to + route.rows * size, 0.f);
  return y;
}

std::vector<Tensor> Dispatch(const Tensor& tokens, const Tensor& order, const Tensor& places, const Tensor& counts) {
  Check(tokens, "tokens");
  return {Spread(Route(order, places, counts, tokens.shape()[0]), tokens, nullptr)};
}

std::vector<Tensor> DispatchBackward(const Tensor& tokens, const Tensor& order, const Tensor& places,
                                     const Tensor& counts, const Tensor& d_rows) {
  const int64_t count = tokens.shape()[0];
  return {Sum(Route(order, places, counts, count), d_rows.contiguous(), nullptr, count)};
}

std::vector<Tensor> Combine(const Tensor& rows, const Tensor& weights, const Tensor& order, const Tensor& places,
                            const Tensor& counts) {
  Check(rows, "rows"), Check(weights, "weights");
  const int64_t tokens = weights.shape()[0];
  const Route route(order, places, counts, tokens);
  PD_CHECK(rows.shape()[0] == route.rows && weights.numel() == route.rows, "there is not a row and a weight each");
  return {Sum(route, rows, weights.data<float>(), tokens)};
}

std::vector<Tensor> CombineBackward(const Tensor& rows, const Tensor& weights, const Tensor& order,
                                    const Tensor& places, const Tensor& counts, const Tensor& d_y) {
  const int64_t tokens = weights.shape()[0], size = rows.shape()[1];
  const Route route(order, places, counts, tokens);
  const Tensor given = d_y.contiguous();
  Tensor d_weights = Like(weights);
  const float *from = rows.data<float>(), *gradient = given.data<float>();
  float* to = d_weights.data<float>();
#pragma omp parallel for
  for (int64_t i = 0; i < route.rows; ++i) {
    const float *row = from + route.places[i] * size, *of_token = gradient + i / route.chosen * size;
    float dot = 0.f;
    if (route.places[i] < route.used)
#pragma omp simd reduction(+ : dot)
      for (int64_t j = 0; j < size; ++j) dot += row[j] * of_token[j];
    to[i] = dot;
  }
  return {Spread(route, given, weights.data<float>()), d_weights};
}

std::vector<Dims> DispatchShapes(const Dims& tokens, const Dims& order, const Dims&, const Dims&) {
  return {{order[0], tokens[1]}};
}
std::vector<Type> DispatchTypes(const Type& tokens, const Type&, const Type&, const Type&) { return {tokens}; }
std::vector<Dims> CombineShapes(const Dims& rows, const Dims& weights, const Dims&, const Dims&, const Dims&) {
  return {{weights[0], rows[1]}};
}
std::vector<Type> CombineTypes(const Type& rows, const Type&, const Type&, const Type&, const Type&) { return {rows}; }

}  // namespace

PD_BUILD_OP(llmsuite_dispatch_rows)
    .Inputs({"tokens", "order", "places", "counts"})
    .Outputs({"rows"})
    .SetKernelFn(PD_KERNEL(Dispatch))
    .SetInferShapeFn(PD_INFER_SHAPE(DispatchShapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(DispatchTypes));
PD_BUILD_GRAD_OP(llmsuite_dispatch_rows)
    .Inputs({"tokens", "order", "places", "counts", paddle::Grad("rows")})
    .Outputs({paddle::Grad("tokens")})
    .SetKernelFn(PD_KERNEL(DispatchBackward));

PD_BUILD_OP(llmsuite_combine_rows)
    .Inputs({"rows", "weights", "order", "places", "counts"})
    .Outputs({"y"})
    .SetKernelFn(PD_KERNEL(Combine))
    .SetInferShapeFn(PD_INFER_SHAPE(CombineShapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(CombineTypes));
PD_BUILD_GRAD_OP(llmsuite_combine_rows)
    .Inputs({"rows", "weights", "order", "places", "counts", paddle::Grad("y")})
    .Outputs({paddle::Grad("rows"), paddle::Grad("weights")})
    .SetKernelFn(PD_KERNEL(CombineBackward));
