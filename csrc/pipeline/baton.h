#pragma once

#include <chrono>
#include <cstdint>

#include "csrc/pipeline/context.h"
#include "csrc/pipeline/timeline.h"

namespace smp::pipeline {

/// Which context of a rank runs, and the account of it: how long turns were,
/// for how long nobody could run, and what the timeline has of both. Belongs to
/// the scheduler's mutex.
class Baton {
 public:
  struct Stats {
    int64_t idle_ns = 0;       ///< within steps, while no context could run
    int64_t num_contexts = 0;  ///< that had a first turn
    int64_t num_switches = 0;  ///< baton passed to another context
  };

  /// @param timeline  records turns and waits of contexts; may be null
  explicit Baton(Timeline* timeline) : timeline_(timeline) {}

  /// A step begins or ends, while nobody has the baton.
  void begin_step(int64_t step, int num_microbatches);
  void end_step();

  /// Null while nobody runs.
  Context* holder() const { return holder_; }
  /// A turn begins: the first one of a context, or one that it has waited for.
  /// @param held_back_by  what it was ready for all the same; null: nothing
  /// @return whether it is the first one; the context runs from now on
  bool give_to(Context* context, const char* held_back_by = nullptr);
  /// The turn is over.
  void take_back();
  /// The holder goes on with its next task without giving the baton back.
  /// @param awaited  what it would have waited for
  void begin_next_task(const char* awaited);

  /// The holder, whose turn ends, begins to wait.
  void note_wait(Context& context, const char* waits_for, int waits_for_rank);
  /// It has got what it waits for, though not yet the baton.
  void note_answer(const Context& context);

  const Stats& stats() const { return stats_; }
  std::chrono::nanoseconds longest_turn() const { return longest_turn_; }

 private:
  using Clock = std::chrono::steady_clock;

  bool is_recorded() const { return timeline_ && timeline_->is_on(); }

  Timeline* const timeline_;
  Context* holder_ = nullptr;
  Clock::time_point turn_began_;
  Clock::time_point idle_since_;
  std::chrono::nanoseconds longest_turn_{0};
  Stats stats_;
};

}  // namespace smp::pipeline
