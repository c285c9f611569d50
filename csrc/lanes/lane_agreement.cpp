#include "csrc/lanes/lane_agreement.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "csrc/common/check.h"
#include "csrc/lanes/byte_strings.h"
#include "csrc/lanes/ipc_lane.h"
#include "csrc/lanes/nccl_lane.h"

namespace smp::lanes {
namespace {

// First character of an offer, and of a reason why there is none.
constexpr char kOffers = '+';
constexpr char kRefuses = '-';

std::string pack_facts(const LaneFacts& facts) {
  return pack({facts.mode, facts.machine, std::to_string(facts.pipeline),
               facts.device, pack(facts.reachable), facts.why_not,
               std::to_string(facts.slot_bytes), facts.why_no_nccl,
               facts.nccl_host});
}

LaneFacts unpack_facts(const std::string& bytes) {
  const std::vector<std::string> parts = unpack(bytes);
  SMP_CHECK(parts.size() == 9,
            "another rank says other things of its lanes; ranks that run "
            "different versions of smp cannot work together");
  return {.mode = parts[0],
          .machine = parts[1],
          .pipeline = std::stoi(parts[2]),
          .device = parts[3],
          .reachable = unpack(parts[4]),
          .why_not = parts[5],
          .why_no_nccl = parts[7],
          .nccl_host = parts[8],
          .slot_bytes = std::stoll(parts[6])};
}

std::vector<int> peers_of(int rank, LaneKind kind, const LaneChoices& choices) {
  std::vector<int> peers;
  for (int other = 0; other < static_cast<int>(choices.size()); ++other) {
    if (other != rank && choices[rank][other].kind == kind) {
      peers.push_back(other);
    }
  }
  return peers;
}

// Returns the most peers of any rank.
int max_peers(LaneKind kind, const LaneChoices& choices) {
  size_t most = 0;
  for (size_t rank = 0; rank < choices.size(); ++rank) {
    most =
        std::max(most, peers_of(static_cast<int>(rank), kind, choices).size());
  }
  return static_cast<int>(most);
}

// Moves ranks with too many peers to the next lane, because a rank has a
// limited number of channels.
void leave_out_crowds(const std::vector<LaneFacts>& facts,
                      LaneChoices& choices) {
  const int size = static_cast<int>(choices.size());
  constexpr size_t most = kMaxChannels / 2;
  std::vector<size_t> counts;
  for (int rank = 0; rank < size; ++rank) {
    counts.push_back(peers_of(rank, LaneKind::kNccl, choices).size());
  }
  for (int a = 0; a < size; ++a) {
    for (int b = 0; b < size; ++b) {
      if (choices[a][b].kind != LaneKind::kNccl) continue;
      const int crowded =
          counts[std::min(a, b)] > most ? std::min(a, b) : std::max(a, b);
      if (counts[crowded] <= most) continue;
      choices[a][b] = choose_after(
          LaneKind::kNccl, a, b, facts,
          detail::concat("global_rank ", crowded, " has ", counts[crowded],
                         " peers over NCCL, and can have ", most));
    }
  }
}

template <typename Lane>
std::string offer_of(Lane* lane, const std::vector<int>& peers) {
  if (peers.empty()) return {};
  try {
    return kOffers + lane->offer(peers);
  } catch (const std::exception& error) {
    return kRefuses + std::string(error.what());
  }
}

// Opens a peer's offer, if this rank has also made one: otherwise the peer does
// not open its own. @return empty, or why this rank cannot
template <typename Open>
std::string verdict_on(const std::string& offer, const std::string& own,
                       const Open& open) {
  try {
    for (const std::string& one : {own, offer}) {
      SMP_CHECK(!one.empty() && one[0] == kOffers,
                one.empty() ? "nothing was offered" : one.substr(1));
    }
    open(offer.substr(1));
    return {};
  } catch (const std::exception& error) {
    return error.what();
  }
}

// Returns for each rank why this rank cannot open its offer; empty: it can.
std::string open_ipc(IpcLane* lane, int global_rank,
                     const std::vector<int>& peers,
                     const std::vector<std::string>& offers) {
  std::vector<std::string> verdicts(offers.size());
  for (const int peer : peers) {
    verdicts[peer] =
        verdict_on(offers[peer], offers[global_rank],
                   [&](const std::string& offer) { lane->open(peer, offer); });
  }
  return pack(verdicts);
}

// Returns the same for NCCL. Both ranks of a pair open each direction together,
// and all ranks keep one order, so that none waits in a circle.
std::string open_nccl(NcclLane* lane, int global_rank,
                      const std::vector<int>& peers,
                      const std::vector<std::string>& offers) {
  std::vector<std::string> verdicts(offers.size());
  std::vector<std::pair<int, int>> directions;
  for (const int peer : peers) {
    directions.emplace_back(global_rank, peer);
    directions.emplace_back(peer, global_rank);
  }
  std::sort(directions.begin(), directions.end());
  for (const auto& [src, dst] : directions) {
    const int peer = src == global_rank ? dst : src;
    const std::string verdict =
        verdict_on(offers[peer], offers[global_rank],
                   [&, from = src, to = dst](const std::string& offer) {
                     lane->open(from, to, offer);
                   });
    if (verdicts[peer].empty()) verdicts[peer] = verdict;
  }
  return pack(verdicts);
}

// Moves pairs that cannot have `kind` to the next lane, on all ranks.
void give_up_failures(LaneKind kind, const std::vector<LaneFacts>& facts,
                      const std::vector<std::string>& verdicts,
                      LaneChoices& choices) {
  const int size = static_cast<int>(choices.size());
  for (int reader = 0; reader < size; ++reader) {
    const std::vector<std::string> row = unpack(verdicts[reader]);
    for (int other = 0; other < size && !row.empty(); ++other) {
      if (row[other].empty() || choices[reader][other].kind != kind) continue;
      choices[reader][other] = choices[other][reader] = choose_after(
          kind, reader, other, facts,
          detail::concat("global_rank ", reader, ": ", row[other]));
    }
  }
}

}  // namespace

LaneChoices agree_on_lanes(const LaneFacts& own, int global_rank,
                           OpenableLanes lanes, const LaneExchange& exchange) {
  std::vector<LaneFacts> facts;
  for (const std::string& bytes : exchange(pack_facts(own))) {
    facts.push_back(unpack_facts(bytes));
  }
  LaneChoices choices = choose_lanes(facts);
  if (max_peers(LaneKind::kIpc, choices) > 0) {
    const auto peers = peers_of(global_rank, LaneKind::kIpc, choices);
    const auto offers = exchange(offer_of(lanes.ipc, peers));
    const auto verdicts =
        exchange(open_ipc(lanes.ipc, global_rank, peers, offers));
    give_up_failures(LaneKind::kIpc, facts, verdicts, choices);
    if (lanes.ipc != nullptr) {
      lanes.ipc->use_only(peers_of(global_rank, LaneKind::kIpc, choices));
    }
  }
  leave_out_crowds(facts, choices);
  if (const int most = max_peers(LaneKind::kNccl, choices); most > 0) {
    if (lanes.nccl != nullptr) lanes.nccl->limit_channels(most);
    const auto peers = peers_of(global_rank, LaneKind::kNccl, choices);
    const auto offers = exchange(offer_of(lanes.nccl, peers));
    const auto verdicts =
        exchange(open_nccl(lanes.nccl, global_rank, peers, offers));
    give_up_failures(LaneKind::kNccl, facts, verdicts, choices);
    if (lanes.nccl != nullptr) {
      lanes.nccl->use_only(peers_of(global_rank, LaneKind::kNccl, choices));
    }
  }
  return choices;
}

}  // namespace smp::lanes
