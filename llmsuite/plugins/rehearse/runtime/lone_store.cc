#include "lone_store.h"

#include <cstring>
#include <map>
#include <vector>

#include "paddle/phi/core/distributed/store/store.h"

namespace rehearse {
namespace {

std::string last;
std::map<std::string, std::vector<uint8_t>> values;  // not of the object, see below

struct LoneStore final : phi::distributed::Store {
  int64_t add(const std::string&, int64_t value) override { return value; }
  std::vector<uint8_t> get(const std::string& key) override {
    last = key;
    auto found = values.find(key);
    return found == values.end() ? std::vector<uint8_t>(8, 1) : found->second;
  }
  bool check(const std::string&) override { return true; }
  void wait(const std::string&) override {}
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    last = key;
    values[key] = value;
  }
};

}  // namespace

std::string last_key() { return last; }

}  // namespace rehearse

// Paddle 3.3.1 lets Python make no store of its own, so a store that it has made gets the functions of this one. Only
// the table of virtual functions is exchanged: none of them uses the object's own fields.
extern "C" __attribute__((visibility("default"))) void rehearse_leave_alone(void* store) {
  static auto* only = new rehearse::LoneStore;
  std::memcpy(store, only, sizeof(void*));
}
