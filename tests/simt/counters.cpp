// Counts of what a warp's requests cost. The lanes of a warp run one after the other; the accesses that they make in one place
// of the code, each for the n-th time, count as one request. Where lanes take different ways through a loop that is an
// estimate.

#include "counters.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "threads.h"

namespace simt {

bool counting = false;

namespace {

constexpr uintptr_t kSector = 32, kBank = 4, kBanks = 32;

// In the order in which tests read them.
struct Counts {
  uint64_t requests, sectors;  // of global memory
  uint64_t shared_requests, conflicts;
  uint64_t atomics, same_address;  // lanes, and those that wait for another one
} counts;

struct Request {
  std::vector<uintptr_t> at;
  size_t size;
  bool atomic, shared;
};

// Of a resident block: by warp, place and number; and how often each thread has been at a place.
struct Requests {
  std::map<std::tuple<unsigned, uint32_t, unsigned>, Request> all;
  std::unordered_map<uint64_t, unsigned> visits;
} pending[kResident];

size_t distinct(std::vector<uintptr_t> values) {
  std::sort(values.begin(), values.end());
  return static_cast<size_t>(std::unique(values.begin(), values.end()) - values.begin());
}

size_t sectors_of(const Request& request) {
  std::vector<uintptr_t> sectors;
  for (const uintptr_t at : request.at) {
    for (uintptr_t sector = at / kSector; sector <= (at + request.size - 1) / kSector; ++sector) sectors.push_back(sector);
  }
  return distinct(std::move(sectors));
}

// Shared memory answers one word of each bank at a time, to as many lanes as 128 bytes serve.
size_t conflicts_of(const Request& request) {
  const size_t together = kBank * kBanks / std::max<size_t>(request.size, kBank);
  size_t conflicts = 0;
  for (size_t begin = 0; begin < request.at.size(); begin += together) {
    std::vector<uintptr_t> banks[kBanks];
    for (size_t i = begin; i < std::min(begin + together, request.at.size()); ++i) {
      for (uintptr_t word = request.at[i] / kBank; word <= (request.at[i] + request.size - 1) / kBank; ++word) {
        banks[word % kBanks].push_back(word);
      }
    }
    size_t most = 1;
    for (const auto& bank : banks) most = std::max(most, distinct(bank));
    conflicts += most - 1;
  }
  return conflicts;
}

}  // namespace

void note_request(const void* at, size_t size, bool atomic, const void* site) {
  const Block& block = simt::block();
  Requests& of = pending[block.slot];
  const uint32_t place = offset_of(site);
  const unsigned visit = of.visits[uint64_t{block.current} << 32 | place]++;
  Request& request = of.all[{block.current / kLanes, place, visit}];
  request.at.push_back(reinterpret_cast<uintptr_t>(at));
  request.size = size;
  request.atomic = atomic;
  request.shared = is_shared(at);
}

void count_requests(const Block& block) {
  for (const auto& [key, request] : pending[block.slot].all) {
    if (request.shared) {
      ++counts.shared_requests;
      counts.conflicts += conflicts_of(request);
    } else {
      ++counts.requests;
      counts.sectors += sectors_of(request);
    }
    if (request.atomic) {
      counts.atomics += request.at.size();
      counts.same_address += request.at.size() - distinct(request.at);
    }
  }
  pending[block.slot] = {};
}

}  // namespace simt

// Start or stop counting, and read the counts since the start, for tests.
extern "C" __attribute__((visibility("default"))) void simt_count(int wish) {
  simt::counting = wish != 0;
  if (simt::counting) simt::counts = {};
  for (auto& each : simt::pending) each = {};
}
extern "C" __attribute__((visibility("default"))) const uint64_t* simt_counts() { return &simt::counts.requests; }
