#include "csrc/lanes/lane_choice.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "csrc/common/check.h"
#include "csrc/lanes/byte_strings.h"
#include "csrc/lanes/ipc_lane.h"

namespace smp::lanes {
namespace {

constexpr const char* kAuto = "auto";
constexpr const char* kIpcWord = "ipc";
constexpr const char* kHostWord = "host";
// Before an offer and before the reason why there is none.
constexpr char kOffers = '+';
constexpr char kRefuses = '-';

std::string pack_facts(const LaneFacts& facts) {
  return pack({facts.mode, facts.machine, std::to_string(facts.pipeline),
               facts.device, pack(facts.reachable), facts.why_not,
               std::to_string(facts.slot_bytes)});
}

LaneFacts unpack_facts(const std::string& bytes) {
  const std::vector<std::string> parts = unpack(bytes);
  SMP_CHECK(parts.size() == 7,
            "another rank says other things of its lanes; ranks that run "
            "different versions of smp cannot work together");
  return {.mode = parts[0],
          .machine = parts[1],
          .pipeline = std::stoi(parts[2]),
          .device = parts[3],
          .reachable = unpack(parts[4]),
          .why_not = parts[5],
          .slot_bytes = std::stoll(parts[6])};
}

void check_same(const std::vector<LaneFacts>& all) {
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const std::string& mode = all[rank].mode;
    SMP_CHECK_VALUE(mode == kAuto || mode == kIpcWord || mode == kHostWord,
                    "SMP_LANE must be auto, ipc or host; global_rank ", rank,
                    " has '", mode, "'");
    SMP_CHECK_VALUE(mode == all[0].mode,
                    "SMP_LANE must be the same on all ranks: global_rank 0 "
                    "has '",
                    all[0].mode, "', global_rank ", rank, " has '", mode, "'");
    SMP_CHECK_VALUE(all[rank].slot_bytes == all[0].slot_bytes,
                    "SMP_LANE_SLOT_MB must be the same on all ranks: a slot of "
                    "global_rank 0 has ",
                    all[0].slot_bytes, " bytes, one of global_rank ", rank, " ",
                    all[rank].slot_bytes);
  }
}

bool can_read(const LaneFacts& reader, const LaneFacts& other) {
  return std::find(reader.reachable.begin(), reader.reachable.end(),
                   other.device) != reader.reachable.end();
}

std::string with_rank(int rank, const std::string& text) {
  return "global_rank " + std::to_string(rank) + ": " + text;
}

// Why two ranks cannot map memory of each other; empty: they may.
std::string why_not_ipc(int a, int b, const std::vector<LaneFacts>& all) {
  if (all[a].machine != all[b].machine) return "they are on different hosts";
  for (const int rank : {a, b}) {
    if (!all[rank].why_not.empty()) return with_rank(rank, all[rank].why_not);
  }
  for (const auto& [reader, other] : {std::pair{a, b}, std::pair{b, a}}) {
    if (!can_read(all[reader], all[other])) {
      return detail::concat("the device of global_rank ", reader,
                            " cannot read that of global_rank ", other,
                            ", or that process does not see it");
    }
  }
  return {};
}

LaneChoice through_host(const LaneFacts& facts, int a, int b,
                        const std::string& reason) {
  SMP_CHECK_VALUE(facts.mode != kIpcWord, "SMP_LANE=ipc: global_ranks ",
                  std::min(a, b), " and ", std::max(a, b),
                  " cannot share memory of their devices: ", reason,
                  "; set SMP_LANE=auto to let such pairs go through "
                  "the host");
  return {LaneKind::kHost, reason};
}

std::vector<int> peers_of(int rank, const LaneChoices& choices) {
  std::vector<int> peers;
  for (int other = 0; other < static_cast<int>(choices.size()); ++other) {
    if (other != rank && choices[rank][other].kind == LaneKind::kIpc) {
      peers.push_back(other);
    }
  }
  return peers;
}

std::string offer_of(IpcLane* lane, const std::vector<int>& peers) {
  if (peers.empty()) return {};
  try {
    return kOffers + lane->offer(peers);
  } catch (const std::exception& error) {
    return kRefuses + std::string(error.what());
  }
}

// For each rank: empty, or why this one cannot open what it offers.
std::string open_all(IpcLane* lane, const std::vector<int>& peers,
                     const std::vector<std::string>& offers) {
  std::vector<std::string> verdicts(offers.size());
  for (const int peer : peers) {
    const std::string& offer = offers[peer];
    try {
      SMP_CHECK(!offer.empty() && offer[0] == kOffers,
                offer.empty() ? "it offers nothing" : offer.substr(1));
      lane->open(peer, offer.substr(1));
    } catch (const std::exception& error) {
      verdicts[peer] = error.what();
    }
  }
  return pack(verdicts);
}

void give_up_failures(const LaneFacts& facts,
                      const std::vector<std::string>& verdicts,
                      LaneChoices& choices) {
  const int size = static_cast<int>(choices.size());
  for (int reader = 0; reader < size; ++reader) {
    const std::vector<std::string> row = unpack(verdicts[reader]);
    for (int other = 0; other < size && !row.empty(); ++other) {
      if (row[other].empty() || choices[reader][other].kind != LaneKind::kIpc) {
        continue;
      }
      choices[reader][other] = choices[other][reader] =
          through_host(facts, reader, other, with_rank(reader, row[other]));
    }
  }
}

}  // namespace

const char* name_of(LaneKind kind) {
  switch (kind) {
    case LaneKind::kHost:
      return kHostWord;
    case LaneKind::kFake:
      return "fake";
    case LaneKind::kIpc:
      return kIpcWord;
    case LaneKind::kNccl:
      return "nccl";
  }
  SMP_ASSERT(false, "lane kind ", static_cast<int>(kind));
}

LaneChoices choose_lanes(const std::vector<LaneFacts>& all) {
  check_same(all);
  const int size = static_cast<int>(all.size());
  LaneChoices choices(size, std::vector<LaneChoice>(size));
  for (int a = 0; a < size; ++a) {
    for (int b = 0; b < size; ++b) {
      if (a == b || all[a].pipeline != all[b].pipeline) continue;
      const std::string reason =
          all[a].mode == kHostWord ? "SMP_LANE=host" : why_not_ipc(a, b, all);
      choices[a][b] =
          reason.empty()
              ? LaneChoice{LaneKind::kIpc, "memory of devices that both map"}
              : through_host(all[a], a, b, reason);
    }
  }
  return choices;
}

LaneChoices agree_on_lanes(const LaneFacts& own, int global_rank, IpcLane* lane,
                           const LaneExchange& exchange) {
  std::vector<LaneFacts> facts;
  for (const std::string& bytes : exchange(pack_facts(own))) {
    facts.push_back(unpack_facts(bytes));
  }
  LaneChoices choices = choose_lanes(facts);
  const int size = static_cast<int>(choices.size());
  bool is_any = false;
  for (int rank = 0; rank < size; ++rank) {
    is_any = is_any || !peers_of(rank, choices).empty();
  }
  if (!is_any) return choices;
  const std::vector<int> peers = peers_of(global_rank, choices);
  const auto offers = exchange(offer_of(lane, peers));
  const auto verdicts = exchange(open_all(lane, peers, offers));
  give_up_failures(own, verdicts, choices);
  if (lane != nullptr) lane->use_only(peers_of(global_rank, choices));
  return choices;
}

}  // namespace smp::lanes
