#include "collectives.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "memory.h"
#include "messages.h"
#include "paddle/phi/common/bfloat16.h"
#include "paddle/phi/common/float16.h"
#include "streams.h"

namespace sim {
namespace {

Communicator* communicator_of(C_CCLComm comm) { return reinterpret_cast<Communicator*>(comm); }

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

// Sums of 16 bits are float32 on the way, and are rounded once.
template <typename T, typename Wide>
void reduce_as(void* to, const std::vector<const char*>& from, size_t count, C_CCLReduceOp op) {
  auto* out = static_cast<T*>(to);
  for (size_t i = 0; i < count; ++i) {
    Wide sum = static_cast<Wide>(reinterpret_cast<const T*>(from[0])[i]);
    for (size_t rank = 1; rank < from.size(); ++rank) {
      const Wide next = static_cast<Wide>(reinterpret_cast<const T*>(from[rank])[i]);
      switch (op) {
        case MAX:
          sum = std::max(sum, next);
          break;
        case MIN:
          sum = std::min(sum, next);
          break;
        case PRODUCT:
          sum = sum * next;
          break;
        default:
          sum = sum + next;
      }
    }
    if (op == AVG) sum = sum / static_cast<Wide>(from.size());
    out[i] = static_cast<T>(sum);
  }
}

void reduce(void* to, const std::vector<const char*>& from, size_t count, C_DataType type, C_CCLReduceOp op) {
  switch (type) {
    case FLOAT32:
      return reduce_as<float, float>(to, from, count, op);
    case FLOAT64:
      return reduce_as<double, double>(to, from, count, op);
    case BFLOAT16:
      return reduce_as<phi::dtype::bfloat16, float>(to, from, count, op);
    case FLOAT16:
      return reduce_as<phi::dtype::float16, float>(to, from, count, op);
    case INT32:
      return reduce_as<int32_t, int32_t>(to, from, count, op);
    case INT64:
      return reduce_as<int64_t, int64_t>(to, from, count, op);
    case INT8:
      return reduce_as<int8_t, int8_t>(to, from, count, op);
    default:
      return reduce_as<uint8_t, uint8_t>(to, from, count, op);
  }
}

// What the ranks compare.
std::string named(const char* call, size_t count, C_DataType type, size_t more = 0) {
  return std::string(call) + " of " + std::to_string(count) + " of type " + std::to_string(type) + ", " +
         std::to_string(more);
}

struct Message {
  bool sends;
  Communicator* comm;
  void* data;
  size_t size, peer;

  void pass() const { sends ? comm->send(data, size, peer) : comm->receive(data, size, peer); }
};

// Those of the same peer and way one after the other, all others at once: no order of them can stand still.
void pass_all(const std::vector<Message>& messages) {
  std::vector<std::vector<Message>> rows;
  for (auto& message : messages) {
    auto is_alike = [&](const std::vector<Message>& row) {
      return row[0].peer == message.peer && row[0].sends == message.sends && row[0].comm == message.comm;
    };
    auto row = std::find_if(rows.begin(), rows.end(), is_alike);
    if (row == rows.end()) row = rows.insert(rows.end(), std::vector<Message>{});
    row->push_back(message);
  }
  std::vector<std::thread> threads;
  for (auto& row : rows) {
    threads.emplace_back([&row] {
      for (auto& message : row) message.pass();
    });
  }
  for (auto& thread : threads) thread.join();
}

Access access_of(const std::string& what, const std::vector<Message>& messages) {
  Access access{what, {}, {}};
  for (auto& message : messages) {
    (message.sends ? access.reads : access.writes).push_back({message.data, message.size});
  }
  return access;
}

thread_local int group_depth = 0;
thread_local std::vector<std::pair<C_Stream, Message>> group;  // what is said between group_start and group_end

C_Status pass_later(C_Stream stream, const Message& message) {
  if (group_depth) {
    group.emplace_back(stream, message);
  } else {
    stream_of(stream)->put(access_of(message.sends ? "send" : "recv", {message}), [message] { message.pass(); });
  }
  return C_SUCCESS;
}

C_Status end_group() {
  if (--group_depth) return C_SUCCESS;
  while (!group.empty()) {
    const C_Stream stream = group[0].first;
    std::vector<Message> mine;
    std::vector<std::pair<C_Stream, Message>> others;
    for (auto& each : group) {
      if (each.first == stream) {
        mine.push_back(each.second);
      } else {
        others.push_back(each);
      }
    }
    group = others;
    stream_of(stream)->put(access_of("group of messages", mine), [mine] { pass_all(mine); });
  }
  return C_SUCCESS;
}

C_Status open_communicator(size_t num_ranks, C_CCLRootId* id, size_t rank, C_CCLComm* comm) {
  *comm = reinterpret_cast<C_CCLComm>(new Communicator(static_cast<char*>(id->data), num_ranks, rank));
  return C_SUCCESS;
}

C_Status make_id(C_CCLRootId* id) {
  static std::atomic<int> count{0};
  std::memset(id->data, 0, id->sz);
  const long long now = std::chrono::steady_clock::now().time_since_epoch().count();
  std::snprintf(static_cast<char*>(id->data), id->sz, "llmsuite-sim-%d-%d-%lld", getpid(), count++, now);
  return C_SUCCESS;
}

C_Status reduce_to_root(void* from, void* to, size_t count, C_DataType type, C_CCLReduceOp op, size_t root,
                        C_CCLComm comm, C_Stream stream) {
  auto* all = communicator_of(comm);
  const size_t size = count * size_of(type);
  const bool is_root = all->rank() == root;
  Access access{"reduce", {{from, size}}, {}};
  if (is_root) access.writes.push_back({to, size});
  stream_of(stream)->put(access, [=] {
    all->together(named("reduce", count, type, op), from, size, nullptr, 0, [=](auto& parts) {
      if (is_root) reduce(inner(to), parts, count, type, op);
    });
  });
  return C_SUCCESS;
}

C_Status broadcast(void* data, size_t count, C_DataType type, size_t root, C_CCLComm comm, C_Stream stream) {
  auto* all = communicator_of(comm);
  const size_t size = count * size_of(type);
  const bool is_root = all->rank() == root;
  Access access{"broadcast", {}, {}};
  (is_root ? access.reads : access.writes).push_back({data, size});
  stream_of(stream)->put(access, [=] {
    all->together(named("broadcast", count, type, root), is_root ? data : nullptr, size, is_root ? nullptr : data, size,
                  [=](auto& parts) {
                    if (!is_root) std::memcpy(inner(data), parts[root], size);
                  });
  });
  return C_SUCCESS;
}

C_Status reduce_scatter(void* from, void* to, size_t count, C_DataType type, C_CCLReduceOp op, C_CCLComm comm,
                        C_Stream stream) {
  auto* all = communicator_of(comm);
  const size_t size = count * size_of(type), num_ranks = all->num_ranks(), rank = all->rank();
  stream_of(stream)->put({"reduce_scatter", {{from, size * num_ranks}}, {{to, size}}}, [=] {
    // `to` may be a part of `from`, so it is poisoned by nobody
    all->together(named("reduce_scatter", count, type, op), from, size * num_ranks, nullptr, 0, [=](auto& parts) {
      auto own = parts;
      for (auto& part : own) part += rank * size;
      reduce(inner(to), own, count, type, op);
    });
  });
  return C_SUCCESS;
}

C_Status all_to_all(const void** from, const size_t* from_count, const C_DataType* from_type, void** to,
                    const size_t* to_count, const C_DataType* to_type, size_t num_ranks, C_CCLComm comm,
                    C_Stream stream) {
  std::vector<Message> messages;
  for (size_t rank = 0; rank < num_ranks; ++rank) {
    auto* data = const_cast<void*>(from[rank]);
    messages.push_back({true, communicator_of(comm), data, from_count[rank] * size_of(from_type[rank]), rank});
    messages.push_back({false, communicator_of(comm), to[rank], to_count[rank] * size_of(to_type[rank]), rank});
  }
  stream_of(stream)->put(access_of("all_to_all", messages), [messages] { pass_all(messages); });
  return C_SUCCESS;
}

}  // namespace

void all_reduce(const void* from, void* to, size_t count, C_DataType type, C_CCLReduceOp op, C_CCLComm comm,
                C_Stream stream) {
  auto* all = communicator_of(comm);
  const size_t size = count * size_of(type);
  stream_of(stream)->put({"all_reduce", {{from, size}}, {{to, size}}}, [=] {
    all->together(named("all_reduce", count, type, op), from, size, to, size,
                  [=](auto& parts) { reduce(inner(to), parts, count, type, op); });
  });
}

void all_gather(const void* from, void* to, size_t count, C_DataType type, C_CCLComm comm, C_Stream stream) {
  auto* all = communicator_of(comm);
  const size_t size = count * size_of(type), num_ranks = all->num_ranks();
  stream_of(stream)->put({"all_gather", {{from, size}}, {{to, size * num_ranks}}}, [=] {
    all->together(named("all_gather", count, type), from, size, to, size * num_ranks, [=](auto& parts) {
      for (size_t rank = 0; rank < num_ranks; ++rank) {
        std::memcpy(static_cast<char*>(inner(to)) + rank * size, parts[rank], size);
      }
    });
  });
}

void fill_collectives(C_DeviceInterface* f) {
  f->xccl_get_comm_name = [](C_CCLComm comm, char* name) {
    return std::strcpy(name, communicator_of(comm)->name().c_str()), C_SUCCESS;
  };
  f->xccl_get_unique_id_size = [](size_t* size) { return *size = 64, C_SUCCESS; };
  f->xccl_get_unique_id = make_id;
  f->xccl_comm_init_rank = open_communicator;
  f->xccl_destroy_comm = [](C_CCLComm) { return C_SUCCESS; };  // a stream may have it still
  f->xccl_all_reduce = [](void* from, void* to, size_t count, C_DataType type, C_CCLReduceOp op, C_CCLComm comm,
                          C_Stream stream) { return all_reduce(from, to, count, type, op, comm, stream), C_SUCCESS; };
  f->xccl_all_gather = [](void* from, void* to, size_t count, C_DataType type, C_CCLComm comm, C_Stream stream) {
    return all_gather(from, to, count, type, comm, stream), C_SUCCESS;
  };
  f->xccl_reduce = reduce_to_root;
  f->xccl_broadcast = broadcast;
  f->xccl_reduce_scatter = reduce_scatter;
  f->xccl_send = [](void* data, size_t count, C_DataType type, size_t peer, C_CCLComm comm, C_Stream stream) {
    return pass_later(stream, {true, communicator_of(comm), data, count * size_of(type), peer});
  };
  f->xccl_recv = [](void* data, size_t count, C_DataType type, size_t peer, C_CCLComm comm, C_Stream stream) {
    return pass_later(stream, {false, communicator_of(comm), data, count * size_of(type), peer});
  };
  f->xccl_group_start = [] { return ++group_depth, C_SUCCESS; };
  f->xccl_group_end = end_group;
  f->xccl_all_to_all = [](const void** from, const size_t* from_count, const C_DataType* from_type, void** to,
                          const size_t* to_count, const C_DataType* to_type, size_t, size_t num_ranks, C_CCLComm comm,
                          C_Stream stream) {
    return all_to_all(from, from_count, from_type, to, to_count, to_type, num_ranks, comm, stream);
  };
}

}  // namespace sim
