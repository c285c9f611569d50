#include <optional>
#include <string>
#include <vector>

#include "csrc/common/check.h"
#include "csrc/health/collective_log.h"
#include "csrc/health/liveness_frame.h"
#include "csrc/health/rank_set.h"
#include "tests/fuzz/cpp/decoder.h"

// Decoders of the hub and its clients: frames with collectives and ranks.

namespace smp::fuzz {

using health::CollectiveLog;
using health::LivenessFrame;
using health::RankSet;

namespace {

void check_frame(const LivenessFrame& frame) {
  std::string bytes = health::encode_frame(frame);
  const std::optional<LivenessFrame> again = health::take_frame(bytes);
  require(again && bytes.empty() && again->type == frame.type &&
              again->global_rank == frame.global_rank &&
              again->progress == frame.progress &&
              again->where == frame.where && again->text == frame.text &&
              again->collectives == frame.collectives,
          "a frame is another one when it is written and read again");
}

void check_collectives(const std::string& bytes) {
  const auto state = CollectiveLog::State::decode(bytes);
  if (state.waits_for) (void)state.has_entered(*state.waits_for);
  const auto again = CollectiveLog::State::decode(state.encode());
  require(again.waits_for.has_value() == state.waits_for.has_value() &&
              again.groups.size() == state.groups.size(),
          "collectives are others when they are written and read again");
}

void check_ranks(const std::string& bytes) {
  const RankSet set = RankSet::decode(bytes);
  const std::vector<int> ranks = set.ranks();
  RankSet again;
  for (const int rank : ranks) again.add(rank);
  require(again.encode() == set.encode() && ranks.empty() == set.is_empty(),
          "ranks are others when they are written and read again");
}

}  // namespace

bool understands(std::span<const uint8_t> input) {
  std::string buffer(input.begin(), input.end());
  bool is_understood = false;
  try {
    while (const auto frame = health::take_frame(buffer)) {
      check_frame(*frame);
      check_collectives(frame->collectives);
      check_ranks(frame->text);
      is_understood = true;
    }
  } catch (const Error&) {
    return false;
  }
  return is_understood && buffer.empty();
}

}  // namespace smp::fuzz
