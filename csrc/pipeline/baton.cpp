#include "csrc/pipeline/baton.h"

#include <algorithm>
#include <utility>

namespace smp::pipeline {

void Baton::begin_step(int64_t step, int num_microbatches) {
  idle_since_ = Clock::now();
  if (is_recorded()) timeline_->begin_step(step, num_microbatches);
}

void Baton::end_step() {
  stats_.idle_ns += (Clock::now() - idle_since_).count();
  if (is_recorded()) timeline_->end_step();
}

bool Baton::give_to(Context* context, const char* held_back_by) {
  holder_ = context;
  if (is_recorded()) {
    const auto [awaited, rank] =
        held_back_by ? std::pair(held_back_by, -1) : reason_of(*context);
    timeline_->begin_run(context->key, awaited, rank);
  }
  turn_began_ = Clock::now();
  stats_.idle_ns += (turn_began_ - idle_since_).count();
  ++stats_.num_switches;
  const bool is_first = context->state == Context::State::kNotStarted;
  if (is_first) ++stats_.num_contexts;
  context->state = Context::State::kRunning;
  return is_first;
}

void Baton::take_back() {
  holder_ = nullptr;
  if (is_recorded()) timeline_->end_run();
  idle_since_ = Clock::now();
  longest_turn_ = std::max<std::chrono::nanoseconds>(longest_turn_,
                                                     idle_since_ - turn_began_);
}

void Baton::begin_next_task(const char* awaited) {
  if (!is_recorded()) return;
  timeline_->end_run();
  timeline_->begin_run(holder_->key, awaited, -1);
}

void Baton::note_wait(Context& context, const char* waits_for,
                      int waits_for_rank) {
  context.state = Context::State::kSuspended;
  context.waits_for = waits_for;
  context.waits_for_rank = waits_for_rank;
  context.waits_since_ns = is_recorded() ? Timeline::now_ns() : 0;
}

void Baton::note_answer(const Context& context) {
  if (!is_recorded()) return;
  timeline_->record_wait(context.key, context.waits_since_ns, context.waits_for,
                         context.waits_for_rank);
}

}  // namespace smp::pipeline
