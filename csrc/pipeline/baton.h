#pragma once

#include <chrono>
#include <cstdint>

#include "csrc/pipeline/context.h"
#include "csrc/pipeline/timeline.h"

namespace smp::pipeline {

/// Records which context of a rank runs and accounts for it: lengths of turns,
/// times in which no context could run, and the timeline of both. Guarded by
/// the scheduler's mutex.
class Baton {
 public:
  struct Stats {
    int64_t idle_ns = 0;       ///< within steps, while no context could run
    int64_t num_contexts = 0;  ///< contexts that had a first turn
    int64_t num_switches = 0;  ///< times that the baton went to another context
  };

  /// @param timeline  records turns and waits of contexts; may be null
  explicit Baton(Timeline* timeline) : timeline_(timeline) {}

  /// Begins or ends a step, while no context has the baton.
  void begin_step(int64_t step, int num_microbatches);
  void end_step();

  /// Returns the context that runs, or null.
  Context* holder() const { return holder_; }
  /// Begins a turn of a context, its first or a later one: it runs from now on.
  /// @param held_back_by  reason for which the context waited although it was
  ///     ready; null: none
  /// @return whether this is the first turn of the context
  bool give_to(Context* context, const char* held_back_by = nullptr);
  /// Ends the turn.
  void take_back();
  /// Lets the holder go on with its next task without giving the baton back.
  /// @param awaited  reason for which it would have waited
  void begin_next_task(const char* awaited);

  /// Notes that the holder, whose turn ends, begins to wait.
  void note_wait(Context& context, const char* waits_for, int waits_for_rank);
  /// Notes that a context has its answer, though not yet the baton.
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
