#include "virtual_collectives.h"

#include <cstring>
#include <string>

#include "lone_store.h"
#include "records.h"
#include "settings.h"

namespace rehearse {
namespace {

struct Communicator {
  size_t num_ranks, rank;
  std::string group;  // the key under which its ranks would meet
};

Communicator* at(C_CCLComm comm) { return reinterpret_cast<Communicator*>(comm); }

size_t size_of(C_DataType type) {
  switch (type) {
    case BOOL:
    case UINT8:
    case INT8:
      return 1;
    case UINT16:
    case INT16:
    case FLOAT16:
    case BFLOAT16:
      return 2;
    case UINT32:
    case INT32:
    case FLOAT32:
      return 4;
    default:
      return 8;
  }
}

// `bytes` is the size of the whole message, of all ranks.
C_Status send(const char* name, double bytes, C_CCLComm comm, C_Stream stream) {
  Work work;
  work.bytes = bytes;
  work.about = at(comm)->num_ranks;
  work.group = at(comm)->group;
  note(What::message, stream_of(reinterpret_cast<const void*>(stream)), name, work);
  return C_SUCCESS;
}

void keep_own(void* to, const void* from, size_t size) {
  if (to && from && to != from && size <= kSmall) std::memmove(to, from, size);
}

C_Status open(size_t num_ranks, C_CCLRootId*, size_t rank, C_CCLComm* comm) {
  *comm = reinterpret_cast<C_CCLComm>(new Communicator{num_ranks, rank, last_key()});
  return C_SUCCESS;
}

C_Status all_reduce(void* from, void* to, size_t count, C_DataType type, C_CCLReduceOp, C_CCLComm comm, C_Stream stream) {
  keep_own(to, from, count * size_of(type));
  return send("all_reduce", double(count) * size_of(type), comm, stream);
}

// Each rank is taken to have what this one has.
C_Status all_gather(void* from, void* to, size_t count, C_DataType type, C_CCLComm comm, C_Stream stream) {
  const size_t part = count * size_of(type), num_ranks = at(comm)->num_ranks;
  if (part * num_ranks <= kSmall) {
    for (size_t rank = 0; rank < num_ranks; ++rank) std::memmove(static_cast<char*>(to) + rank * part, from, part);
  }
  return send("all_gather", double(part) * num_ranks, comm, stream);
}

C_Status reduce_scatter(void* from, void* to, size_t count, C_DataType type, C_CCLReduceOp, C_CCLComm comm,
                        C_Stream stream) {
  const size_t part = count * size_of(type);
  keep_own(to, static_cast<const char*>(from) + at(comm)->rank * part, part);
  return send("reduce_scatter", double(part) * at(comm)->num_ranks, comm, stream);
}

C_Status reduce(void* from, void* to, size_t count, C_DataType type, C_CCLReduceOp, size_t, C_CCLComm comm,
                C_Stream stream) {
  keep_own(to, from, count * size_of(type));
  return send("reduce", double(count) * size_of(type), comm, stream);
}

C_Status all_to_all(const void** from, const size_t* from_count, const C_DataType* from_type, void** to,
                    const size_t* to_count, const C_DataType* to_type, size_t, size_t num_ranks, C_CCLComm comm,
                    C_Stream stream) {
  double bytes = 0;
  for (size_t rank = 0; rank < num_ranks; ++rank) {
    const size_t sent = from_count[rank] * size_of(from_type[rank]), came = to_count[rank] * size_of(to_type[rank]);
    bytes += sent;
    if (sent == came) keep_own(to[rank], from[rank], sent);
  }
  return send("all_to_all", bytes, comm, stream);
}

}  // namespace

void fill_collectives(C_DeviceInterface* f) {
  f->xccl_get_comm_name = [](C_CCLComm, char* name) { return std::strcpy(name, kDeviceType), C_SUCCESS; };
  f->xccl_get_unique_id_size = [](size_t* size) { return *size = 8, C_SUCCESS; };
  f->xccl_get_unique_id = [](C_CCLRootId* id) { return std::memset(id->data, 1, id->sz), C_SUCCESS; };
  f->xccl_comm_init_rank = open;
  f->xccl_destroy_comm = [](C_CCLComm) { return C_SUCCESS; };
  f->xccl_all_reduce = all_reduce;
  f->xccl_all_gather = all_gather;
  f->xccl_reduce_scatter = reduce_scatter;
  f->xccl_reduce = reduce;
  f->xccl_all_to_all = all_to_all;
  f->xccl_broadcast = [](void*, size_t count, C_DataType type, size_t, C_CCLComm comm, C_Stream stream) {
    return send("broadcast", double(count) * size_of(type), comm, stream);
  };
  f->xccl_send = [](void*, size_t count, C_DataType type, size_t, C_CCLComm comm, C_Stream stream) {
    return send("send", double(count) * size_of(type), comm, stream);
  };
  f->xccl_recv = [](void* data, size_t count, C_DataType type, size_t, C_CCLComm comm, C_Stream stream) {
    // zeros are what a stage in the middle of a pipeline leaves its first wait for batches by
    if (count * size_of(type) <= kSmall) std::memset(data, 0, count * size_of(type));
    return send("recv", double(count) * size_of(type), comm, stream);
  };
  f->xccl_group_start = [] { return C_SUCCESS; };
  f->xccl_group_end = [] { return C_SUCCESS; };
}

}  // namespace rehearse
