#include "csrc/health/news_of_ranks.h"

#include <sstream>
#include <string>
#include <utility>

#include "csrc/common/check.h"
#include "csrc/health/collective_log.h"
#include "csrc/health/rank_set.h"

namespace smp::health {
namespace {

using Type = LivenessFrame::Type;

// Returns the fault of an unreachable host. If the frame names this rank, the
// sender is the culprit seen from here: a fault of this rank would be an
// exception that it raises itself.
Fault unreachable(const FaultBoard& board, LivenessFrame& frame) {
  const int named = static_cast<int>(frame.progress);
  const bool is_this = named == board.global_rank();
  return {.kind = Fault::Kind::kUnreachable,
          .global_rank = is_this ? frame.global_rank : named,
          .text = is_this ? "it gets nothing from the host of this rank"
                          : std::move(frame.text)};
}

Fault stuck(LivenessFrame& frame) {
  std::istringstream numbers(frame.where);
  Fault fault{.kind = Fault::Kind::kStuck, .text = std::move(frame.text)};
  for (int rank = -1; numbers >> rank;) fault.stuck.push_back(rank);
  SMP_CHECK(!fault.stuck.empty(), "liveness frame of stuck ranks without one");
  fault.global_rank = fault.stuck.front();
  return fault;
}

void take_left_before(FaultBoard& board, const LivenessFrame& answer) {
  const auto asked = CollectiveLog::State::decode(answer.collectives);
  SMP_CHECK(asked.waits_for, "liveness frame about a collective without one");
  board.goodbyes().on_answer(*asked.waits_for,
                             static_cast<int>(answer.progress));
}

}  // namespace

bool put_on_board(FaultBoard& board, LivenessFrame& frame) {
  switch (frame.type) {
    case Type::kRaised:
      board.report({.kind = Fault::Kind::kRaised,
                    .global_rank = frame.global_rank,
                    .where = std::move(frame.where),
                    .text = std::move(frame.text)});
      return true;
    case Type::kDied:
      board.report(
          {.kind = Fault::Kind::kDied, .global_rank = frame.global_rank});
      return true;
    case Type::kUnreachable:
      board.report(unreachable(board, frame));
      return true;
    case Type::kDeadlock:
      board.report(
          {.kind = Fault::Kind::kDeadlock, .text = std::move(frame.text)});
      return true;
    case Type::kStuck:
      board.report(stuck(frame));
      return true;
    case Type::kMissed:
      board.report({.kind = Fault::Kind::kLeft,
                    .global_rank = static_cast<int>(frame.progress),
                    .text = std::move(frame.text)});
      return true;
    case Type::kLeftRanks:
      board.mark_left(RankSet::decode(frame.text));
      return true;
    case Type::kLeftBefore:
      take_left_before(board, frame);
      return true;
    default:
      return false;
  }
}

}  // namespace smp::health
