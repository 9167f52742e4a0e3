// The few functions of oneDNN's C interface that are called here, as its headers declare them (oneDNN 3, oneapi/dnnl).
// Paddle's wheel has the library, libdnnl.so.3, and none of the headers; the package with the headers brings a second
// library and three runtimes. Tested with 3.6.2, which is in the wheel of Paddle 3.3.1; what version there is, is asked
// at run time.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {
typedef struct dnnl_engine* dnnl_engine_t;
typedef struct dnnl_stream* dnnl_stream_t;
typedef struct dnnl_memory* dnnl_memory_t;
typedef struct dnnl_memory_desc* dnnl_memory_desc_t;
typedef struct dnnl_primitive_desc* dnnl_primitive_desc_t;
typedef struct dnnl_primitive* dnnl_primitive_t;
typedef struct dnnl_primitive_attr* dnnl_primitive_attr_t;
typedef struct dnnl_post_ops* dnnl_post_ops_t;
typedef int64_t dnnl_dims_t[12];

typedef enum { dnnl_success = 0 } dnnl_status_t;
typedef enum { dnnl_data_type_undef = 0, dnnl_bf16 = 2, dnnl_f32 = 3 } dnnl_data_type_t;
typedef enum { dnnl_binary_add = 0x1fff0 } dnnl_alg_kind_t;
typedef enum { dnnl_cpu = 1 } dnnl_engine_kind_t;
enum { dnnl_stream_in_order = 1 };
enum { DNNL_ARG_SRC = 1, DNNL_ARG_DST = 17, DNNL_ARG_WEIGHTS = 33, DNNL_ARG_FIRST_ADDEND = 32768 | 2 };  // of post-ops
typedef struct {
  int arg;
  dnnl_memory_t memory;
} dnnl_exec_arg_t;
typedef struct {  // the first members; there are more
  int major, minor, patch;
} dnnl_version_t;

const dnnl_version_t* dnnl_version(void);
dnnl_status_t dnnl_engine_create(dnnl_engine_t*, dnnl_engine_kind_t, size_t index);
dnnl_status_t dnnl_stream_create(dnnl_stream_t*, dnnl_engine_t, unsigned flags);
dnnl_status_t dnnl_stream_wait(dnnl_stream_t);
dnnl_status_t dnnl_memory_desc_create_with_strides(dnnl_memory_desc_t*, int ndims, const dnnl_dims_t dims,
                                                   dnnl_data_type_t, const dnnl_dims_t strides);
dnnl_status_t dnnl_memory_desc_destroy(dnnl_memory_desc_t);
dnnl_status_t dnnl_memory_create(dnnl_memory_t*, const struct dnnl_memory_desc*, dnnl_engine_t, void* data);
dnnl_status_t dnnl_memory_destroy(dnnl_memory_t);
dnnl_status_t dnnl_memory_set_data_handle(dnnl_memory_t, void* data);
dnnl_status_t dnnl_matmul_primitive_desc_create(dnnl_primitive_desc_t*, dnnl_engine_t,
                                                const struct dnnl_memory_desc* source,
                                                const struct dnnl_memory_desc* weights,
                                                const struct dnnl_memory_desc* bias,
                                                const struct dnnl_memory_desc* destination,
                                                const struct dnnl_primitive_attr* attributes);
dnnl_status_t dnnl_post_ops_create(dnnl_post_ops_t*);
dnnl_status_t dnnl_post_ops_destroy(dnnl_post_ops_t);
dnnl_status_t dnnl_post_ops_append_sum(dnnl_post_ops_t, float scale, int32_t zero_point, dnnl_data_type_t);
dnnl_status_t dnnl_post_ops_append_binary(dnnl_post_ops_t, dnnl_alg_kind_t, const struct dnnl_memory_desc* other);
dnnl_status_t dnnl_primitive_attr_create(dnnl_primitive_attr_t*);
dnnl_status_t dnnl_primitive_attr_destroy(dnnl_primitive_attr_t);
dnnl_status_t dnnl_primitive_attr_set_post_ops(dnnl_primitive_attr_t, const struct dnnl_post_ops*);
dnnl_status_t dnnl_primitive_desc_destroy(dnnl_primitive_desc_t);
dnnl_status_t dnnl_primitive_create(dnnl_primitive_t*, const struct dnnl_primitive_desc*);
dnnl_status_t dnnl_primitive_destroy(dnnl_primitive_t);
dnnl_status_t dnnl_primitive_execute(const struct dnnl_primitive*, dnnl_stream_t, int count, const dnnl_exec_arg_t*);
dnnl_status_t dnnl_set_primitive_cache_capacity(int capacity);
}
