#include "csrc/lanes/lane_choice.h"

#include <algorithm>
#include <utility>

#include "csrc/common/check.h"

namespace smp::lanes {
namespace {

constexpr const char* kAuto = "auto";
constexpr const char* kIpcWord = "ipc";
constexpr const char* kNcclWord = "nccl";
constexpr const char* kHostWord = "host";

void check_same(const std::vector<LaneFacts>& all) {
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const std::string& mode = all[rank].mode;
    SMP_CHECK_VALUE(mode == kAuto || mode == kIpcWord || mode == kNcclWord ||
                        mode == kHostWord,
                    "SMP_LANE must be auto, ipc, nccl or host; global_rank ",
                    rank, " has '", mode, "'");
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

// Returns why two ranks cannot map each other's memory; empty: they can.
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

// Returns the same for NCCL, which needs a device for each rank of a host.
std::string why_not_nccl(int a, int b, const std::vector<LaneFacts>& all) {
  for (const int rank : {a, b}) {
    if (!all[rank].why_no_nccl.empty()) {
      return with_rank(rank, all[rank].why_no_nccl);
    }
  }
  const auto host_of = [&](int rank) {
    const LaneFacts& facts = all[rank];
    return facts.nccl_host.empty() ? facts.machine : facts.nccl_host;
  };
  if (host_of(a) == host_of(b) && !all[a].device.empty() &&
      all[a].device == all[b].device) {
    return "NCCL needs a device for each rank, and they share one";
  }
  return {};
}

[[noreturn]] void refuse(const std::string& mode, int a, int b,
                         const std::string& what, const std::string& reason) {
  SMP_CHECK_VALUE(false, "SMP_LANE=", mode, ": global_ranks ", std::min(a, b),
                  " and ", std::max(a, b), " cannot ", what, ": ", reason,
                  "; set SMP_LANE=auto to let such pairs go another way");
}

// Returns the choice for a pair that cannot have better lanes for this reason.
LaneChoice without_nccl(int a, int b, const std::vector<LaneFacts>& all,
                        const std::string& reason) {
  if (all[a].mode == kNcclWord) refuse(kNcclWord, a, b, "use NCCL", reason);
  return {LaneKind::kHost, reason};
}

LaneChoice without_ipc(int a, int b, const std::vector<LaneFacts>& all,
                       const std::string& reason) {
  const std::string& mode = all[a].mode;
  if (mode == kIpcWord) {
    refuse(mode, a, b, "share memory of their devices", reason);
  }
  const std::string no_nccl = why_not_nccl(a, b, all);
  if (no_nccl.empty()) return {LaneKind::kNccl, reason};
  return without_nccl(a, b, all,
                      mode == kNcclWord
                          ? no_nccl
                          : detail::concat(reason, "; no NCCL: ", no_nccl));
}

LaneChoice choose_lane(int a, int b, const std::vector<LaneFacts>& all) {
  const std::string& mode = all[a].mode;
  if (mode == kHostWord) return {LaneKind::kHost, "SMP_LANE=host"};
  if (mode == kNcclWord) return without_ipc(a, b, all, "SMP_LANE=nccl");
  const std::string reason = why_not_ipc(a, b, all);
  if (!reason.empty()) return without_ipc(a, b, all, reason);
  return {LaneKind::kIpc, "memory of devices that both map"};
}

}  // namespace

// The call that receives would return when the tensor has come, and the receipt
// that makes the other rank send leaves after the call.
std::string why_no_nccl_with(const std::string& launch_blocking) {
  if (launch_blocking.empty() || launch_blocking == "0") return {};
  return detail::concat("with CUDA_LAUNCH_BLOCKING=", launch_blocking,
                        " a rank that receives would wait for a tensor that "
                        "the other rank sends afterwards");
}

const char* name_of(LaneKind kind) {
  switch (kind) {
    case LaneKind::kHost:
      return kHostWord;
    case LaneKind::kFake:
      return "fake";
    case LaneKind::kIpc:
      return kIpcWord;
    case LaneKind::kNccl:
      return kNcclWord;
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
      choices[a][b] = choose_lane(a, b, all);
    }
  }
  return choices;
}

LaneChoice choose_after(LaneKind kind, int a, int b,
                        const std::vector<LaneFacts>& all,
                        const std::string& reason) {
  return kind == LaneKind::kIpc ? without_ipc(a, b, all, reason)
                                : without_nccl(a, b, all, reason);
}

}  // namespace smp::lanes
