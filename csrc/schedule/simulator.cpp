#include "csrc/schedule/simulator.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <queue>
#include <utility>

#include "csrc/common/check.h"
#include "csrc/schedule/chain_state.h"
#include "csrc/schedule/simulator_checks.h"

namespace smp::schedule {
namespace {

using Task = ChainState::Task;
using Status = ChainState::Status;

// Converts to whole nanoseconds: sums are exact, so events that should coincide
// do.
int64_t to_ns(double ms) { return std::llround(ms * 1e6); }
double to_ms(int64_t ns) { return static_cast<double>(ns) * 1e-6; }

struct Event {
  enum class Kind { kEnd, kArrival };
  int64_t time_ns = 0;
  int64_t number = 0;  // in the order in which events were made
  Kind kind = Kind::kEnd;
  Task task;  // that ends, or whose data arrive

  bool operator>(const Event& other) const {
    return std::pair(time_ns, number) > std::pair(other.time_ns, other.number);
  }
};

struct RankState {
  bool is_busy = false;
  std::vector<std::pair<Task, ReadyTask>> ready;
  ActionList begun;
  int64_t busy_ns = 0;
  int64_t num_held = 0;
  int64_t held_bytes = 0;
  RankUsage usage;
};

class Simulation {
 public:
  Simulation(const SimulationInput& input,
             const std::vector<const Policy*>& policies, const Schedule* lists)
      : input_(input),
        policies_(policies),
        lists_(lists),
        chain_(input, policies),
        ranks_(policies.size()) {
    num_left_.assign(input.num_microbatches, 0);
    for (int mb = 0; mb < input.num_microbatches; ++mb) {
      for (int s = 0; s < chain_.num_stages(); ++s) {
        num_left_[mb] += chain_.is_split(s, mb) ? 3 : 2;
      }
    }
  }

  SimulationResult run() {
    while (true) {
      offer_body();
      open_backwards();
      start_tasks();
      if (events_.empty()) break;
      now_ns_ = events_.top().time_ns;
      while (!events_.empty() && events_.top().time_ns == now_ns_) {
        const Event event = events_.top();
        events_.pop();
        if (event.kind == Event::Kind::kEnd) {
          end(event.task);
        } else {
          make_ready(event.task);
        }
      }
    }
    SMP_CHECK(chain_.is_finished(), "this schedule comes to a stop after ",
              to_ms(now_ns_), " ms:", chain_.describe_stop(policies_, lists_));
    return result();
  }

 private:
  // Offers the body of the next microbatch as one of the tasks, as the server
  // does.
  void offer_body() {
    const Task body{0, Phase::kForward, chain_.num_begun};
    if (chain_.may_begin_body() && chain_.status(body) == Status::kWaiting) {
      make_ready(body);
    }
  }

  // Sends microbatches at the end of the chain into their backward when the
  // driver allows it.
  void open_backwards() {
    const int last = chain_.num_stages() - 1;
    for (int mb = 0; mb < chain_.num_begun; ++mb) {
      if (chain_.may_go_back[mb] ||
          !chain_.is_done({last, Phase::kForward, mb})) {
        continue;
      }
      const int driver = chain_.driver();
      if (!policies_[driver]->may_begin_backward(progress(driver))) return;
      chain_.may_go_back[mb] = true;
      make_ready({last, Phase::kBackward, mb});
    }
  }

  StepProgress progress(int rank) const {
    StepProgress progress;
    progress.num_microbatches = chain_.num_microbatches();
    if (rank == chain_.driver()) {
      progress.num_forwards_pending = chain_.num_begun -
                                      chain_.num_forwards_done +
                                      (chain_.may_begin_body() ? 1 : 0);
    }
    progress.num_partitions = chain_.num_ranks();
    progress.num_chunks = chain_.num_chunks(rank);
    progress.depth = chain_.depth(rank);
    progress.active_microbatches = chain_.active_microbatches();
    progress.begun = ranks_[rank].begun;
    progress.ended = ended_;
    return progress;
  }

  void make_ready(const Task& task) {
    chain_.set_status(task, Status::kReady);
    const Action action = chain_.action(task);
    ReadyTask ready;
    ready.key = {task.phase, task.mb, task.stage, 0, 0};
    ready.arrival = next_number_++;
    ready.not_started = true;
    ready.chunk = action.chunk;
    ranks_[chain_.rank_of(task.stage)].ready.emplace_back(task, ready);
  }

  void start_tasks() {
    for (int rank = 0; rank < chain_.num_ranks(); ++rank) {
      RankState& state = ranks_[rank];
      if (state.is_busy || state.ready.empty()) continue;
      std::vector<ReadyTask> ready;
      for (const auto& [task, offer] : state.ready) ready.push_back(offer);
      const auto choice = policies_[rank]->pick(ready, progress(rank));
      if (!choice) continue;
      SMP_ASSERT(*choice < ready.size(), "policy '", policies_[rank]->name(),
                 "' picked ", *choice, " of ", ready.size());
      const Task task = state.ready[*choice].first;
      state.ready.erase(state.ready.begin() + static_cast<int64_t>(*choice));
      begin(rank, task);
    }
  }

  void begin(int rank, const Task& task) {
    RankState& state = ranks_[rank];
    const StageCost& cost = input_.stages[task.stage];
    state.is_busy = true;
    state.begun.push_back(chain_.action(task));
    chain_.set_status(task, Status::kRunning);
    if (task.phase == Phase::kForward) {
      if (task.stage == 0) {
        ++chain_.num_begun;
        ++chain_.num_in_flight;
      }
      state.held_bytes += cost.activation_bytes;
      RankUsage& usage = state.usage;
      usage.peak_activations =
          std::max(usage.peak_activations, ++state.num_held);
      usage.peak_activation_bytes =
          std::max(usage.peak_activation_bytes, state.held_bytes);
    }
    const int64_t duration_ns = duration(task);
    state.busy_ns += duration_ns;
    push(now_ns_ + duration_ns, Event::Kind::kEnd, task);
    timeline_.push_back({rank, task.stage, chain_.action(task), to_ms(now_ns_),
                         to_ms(now_ns_ + duration_ns)});
  }

  int64_t duration(const Task& task) const {
    const StageCost& cost = input_.stages[task.stage];
    if (task.phase == Phase::kForward) return to_ns(cost.forward_ms);
    if (task.phase == Phase::kWeight) return to_ns(cost.weight_ms);
    return to_ns(cost.backward_ms) +
           (chain_.is_split(task.stage, task.mb) ? 0 : to_ns(cost.weight_ms));
  }

  void end(const Task& task) {
    const auto [stage, phase, mb] = task;
    RankState& state = ranks_[chain_.rank_of(stage)];
    state.is_busy = false;
    chain_.set_status(task, Status::kDone);
    if (phase == Phase::kForward) {
      if (stage + 1 < chain_.num_stages()) {
        send(stage, {stage + 1, Phase::kForward, mb});
      } else {
        ++chain_.num_forwards_done;
      }
    } else {
      const bool is_split = chain_.is_split(stage, mb);
      if (phase == Phase::kBackward) {
        if (stage > 0) send(stage, {stage - 1, Phase::kBackward, mb});
        if (stage == 0) --chain_.num_in_flight;
        if (is_split) make_ready({stage, Phase::kWeight, mb});
      }
      if (phase == Phase::kWeight || !is_split) {
        --state.num_held;
        state.held_bytes -= input_.stages[stage].activation_bytes;
      }
    }
    if (--num_left_[mb] == 0) ended_.push_back(mb);
  }

  // Hands the result of stage `from` to a task of a neighbour.
  void send(int from, const Task& to) {
    const int sender = chain_.rank_of(from);
    const int receiver = chain_.rank_of(to.stage);
    if (sender == receiver || input_.boundaries.empty()) {
      push(now_ns_, Event::Kind::kArrival, to);
      return;
    }
    const BoundaryCost& cost = input_.boundaries[std::min(from, to.stage)];
    const int64_t num_bytes =
        to.phase == Phase::kForward ? cost.forward_bytes : cost.backward_bytes;
    int64_t& free_ns = link_free_ns_[{sender, receiver}];
    free_ns = std::max(free_ns, now_ns_) +
              to_ns(cost.ms_per_byte * static_cast<double>(num_bytes));
    push(free_ns + to_ns(cost.latency_ms), Event::Kind::kArrival, to);
  }

  void push(int64_t time_ns, Event::Kind kind, const Task& task) {
    events_.push({time_ns, next_number_++, kind, task});
  }

  SimulationResult result() {
    SimulationResult result;
    result.makespan_ms = to_ms(now_ns_);
    for (RankState& state : ranks_) {
      state.usage.busy_ms = to_ms(state.busy_ns);
      state.usage.bubble_ms = to_ms(now_ns_ - state.busy_ns);
      result.ranks.push_back(state.usage);
      result.executed.push_back(std::move(state.begun));
    }
    result.timeline = std::move(timeline_);
    std::ranges::stable_sort(result.timeline, {}, [](const TimelineEntry& e) {
      return std::pair(e.start_ms, e.rank);
    });
    return result;
  }

  const SimulationInput& input_;
  const std::vector<const Policy*>& policies_;
  const Schedule* const lists_;
  ChainState chain_;
  std::vector<RankState> ranks_;
  std::vector<int> num_left_;   // tasks per microbatch
  std::vector<int64_t> ended_;  // microbatches without tasks left
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::map<std::pair<int, int>, int64_t> link_free_ns_;
  std::vector<TimelineEntry> timeline_;
  int64_t now_ns_ = 0;
  int64_t next_number_ = 0;
};

}  // namespace

SimulationResult simulate(const SimulationInput& input,
                          const std::vector<const Policy*>& policies) {
  check_input(input, policies.size());
  return Simulation(input, policies, nullptr).run();
}

SimulationResult simulate(const SimulationInput& input,
                          const std::string& policy_name) {
  const auto policy = make_policy(policy_name);
  const std::vector<const Policy*> policies(num_ranks(input), policy.get());
  return simulate(input, policies);
}

Schedule executed_by_equal_stages(const Policy& policy,
                                  const PipelineSize& size,
                                  int active_microbatches) {
  SimulationInput input;
  for (int s = 0; s < size.num_partitions * size.num_chunks; ++s) {
    input.stages.push_back({s % size.num_partitions, 1, 1, 1, 0});
  }
  input.num_microbatches = size.num_microbatches;
  input.active_microbatches = active_microbatches;
  return simulate(input, std::vector(num_ranks(input), &policy)).executed;
}

SimulationResult simulate_lists(const SimulationInput& input,
                                const Schedule& schedule) {
  check_input(input, schedule.size());
  check_lists(input, schedule);
  std::vector<std::unique_ptr<Policy>> owned;
  std::vector<const Policy*> policies;
  for (const ActionList& actions : schedule) {
    owned.push_back(make_listed_policy(actions));
    policies.push_back(owned.back().get());
  }
  return Simulation(input, policies, &schedule).run();
}

}  // namespace smp::schedule
