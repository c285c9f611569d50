#include "csrc/health/collective_log.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <type_traits>

#include "csrc/health/rank_set.h"

namespace smp::health {
namespace {

using State = CollectiveLog::State;

// The part of a State's bytes before the ranks and groups. All hosts of a run
// have the same byte order.
struct Header {
  uint64_t group;
  int64_t sequence;
  uint64_t signature;
  int64_t num_bytes;
  uint32_t ranks_bytes;
  uint32_t num_groups;
  uint8_t waits;
  uint8_t goes_on_alone;
  uint8_t ranks_are_set;  // else a list of int
  uint8_t reserved[5];
};

static_assert(std::is_trivially_copyable_v<State::Group>);

std::string list_of(const std::vector<int>& ranks) {
  return {reinterpret_cast<const char*>(ranks.data()),
          ranks.size() * sizeof(int)};
}

// Returns whether a bit set takes fewer bytes than a list of the ranks.
// Thousands of ranks may wait for each other, and each lists the ranks it waits
// for.
bool is_shorter_as_set(const std::vector<int>& ranks) {
  if (ranks.empty()) return false;
  const auto [lowest, highest] =
      std::minmax_element(ranks.begin(), ranks.end());
  return *lowest >= 0 &&
         static_cast<size_t>(*highest) / 8 < ranks.size() * sizeof(int);
}

RankSet set_of(const std::vector<int>& ranks) {
  RankSet set;
  for (const int rank : ranks) set.add(rank);
  return set;
}

std::vector<int> read_list(std::string_view bytes) {
  std::vector<int> ranks(bytes.size() / sizeof(int));
  // memcpy must not get the null pointer of an empty vector
  if (!ranks.empty()) std::memcpy(ranks.data(), bytes.data(), bytes.size());
  return ranks;
}

}  // namespace

void CollectiveLog::enter(CollectiveId& id) {
  std::lock_guard lock(mutex_);
  State::Group& group = groups_[id.group];
  group.group = id.group;
  id.sequence = ++group.num_entered;
  group.signatures[static_cast<size_t>(id.sequence) % kNumSignatures] =
      id.signature;
}

State CollectiveLog::state(std::optional<CollectiveId> waits_for) const {
  State result;
  result.waits_for = std::move(waits_for);
  std::lock_guard lock(mutex_);
  for (const auto& [key, group] : groups_) result.groups.push_back(group);
  return result;
}

std::string State::encode() const {
  Header header{};
  const CollectiveId id = waits_for.value_or(CollectiveId{});
  header.group = id.group;
  header.sequence = id.sequence;
  header.signature = id.signature;
  header.num_bytes = id.num_bytes;
  const bool is_set = is_shorter_as_set(id.ranks);
  const std::string ranks =
      is_set ? set_of(id.ranks).encode() : list_of(id.ranks);
  header.ranks_bytes = static_cast<uint32_t>(ranks.size());
  header.ranks_are_set = is_set ? 1 : 0;
  header.num_groups = static_cast<uint32_t>(groups.size());
  header.waits = waits_for.has_value() ? 1 : 0;
  header.goes_on_alone = id.goes_on_alone ? 1 : 0;
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof(header));
  bytes.append(ranks);
  bytes.append(reinterpret_cast<const char*>(groups.data()),
               groups.size() * sizeof(Group));
  return bytes;
}

State State::decode(const std::string& bytes) {
  State result;
  Header header{};
  if (bytes.size() < sizeof(header)) return result;
  std::memcpy(&header, bytes.data(), sizeof(header));
  const bool is_set = header.ranks_are_set != 0;
  const size_t ranks_bytes = header.ranks_bytes;
  const size_t groups_bytes = size_t{header.num_groups} * sizeof(Group);
  if (bytes.size() != sizeof(header) + ranks_bytes + groups_bytes ||
      (!is_set && ranks_bytes % sizeof(int) != 0)) {
    return result;
  }
  const std::string_view ranks(bytes.data() + sizeof(header), ranks_bytes);
  if (header.waits != 0) {
    CollectiveId id;
    id.group = header.group;
    id.sequence = header.sequence;
    id.signature = header.signature;
    id.num_bytes = header.num_bytes;
    id.goes_on_alone = header.goes_on_alone != 0;
    id.ranks = is_set ? RankSet::decode(ranks).ranks() : read_list(ranks);
    result.waits_for = std::move(id);
  }
  result.groups.resize(header.num_groups);
  if (groups_bytes > 0) {  // memcpy takes no null pointer, of an empty vector
    std::memcpy(result.groups.data(), ranks.data() + ranks_bytes, groups_bytes);
  }
  // Counts are never negative, so their differences do not overflow.
  const bool is_right =
      header.sequence >= 0 &&
      std::none_of(result.groups.begin(), result.groups.end(),
                   [](const Group& one) { return one.num_entered < 0; });
  return is_right ? result : State();
}

bool State::has_entered(const CollectiveId& id) const {
  const auto group =
      std::find_if(groups.begin(), groups.end(),
                   [&](const Group& one) { return one.group == id.group; });
  if (group == groups.end() || group->num_entered < id.sequence) return false;
  if (!id.goes_on_alone && (!waits_for || waits_for->group != id.group)) {
    return false;
  }
  // A call whose signature later calls have overwritten counts as equal.
  return group->num_entered - id.sequence >=
             static_cast<int64_t>(kNumSignatures) ||
         group->signatures[static_cast<size_t>(id.sequence) % kNumSignatures] ==
             id.signature;
}

}  // namespace smp::health
