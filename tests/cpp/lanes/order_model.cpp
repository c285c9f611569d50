#include "tests/cpp/lanes/order_model.h"

#include <algorithm>
#include <iterator>

namespace smp::lanes {
namespace {

// Streams of a rank. The streams of pairs of ranks have numbers from 0 on.
constexpr int kCompute = -1;
constexpr int kCopies = -2;
constexpr int kCopiesOut = -3;
constexpr int kCopiesIn = -4;
constexpr int kHostOut = -5;
constexpr int kHostIn = -6;
constexpr int kNumOthers = 6;

// Returns the number of a rank's stream in the order in which it makes them.
int number_of(int stream) {
  return stream < 0 ? -1 - stream : kNumOthers + stream;
}

template <typename T>
void add_once(std::vector<T>& to, T value) {
  if (std::find(to.begin(), to.end(), value) == to.end()) to.push_back(value);
}

}  // namespace

OrderModel::OrderModel(uint64_t seed, OrderRule rule)
    : rule_(rule), random_(seed) {
  make_graph();
}

// Later tasks depend on earlier ones; nothing else is said about their order.
void OrderModel::make_graph() {
  num_ranks_ = 2 + pick(3);
  const int num_tasks = 4 + pick(13);
  for (int i = 0; i < num_tasks; ++i) {
    Task task;
    task.rank = pick(num_ranks_);
    for (int n = i == 0 ? 0 : pick(4); n > 0; --n) {
      add_once(task.inputs, pick(i));
    }
    task.num_missing = static_cast<int>(task.inputs.size());
    for (const int input : task.inputs) {
      Task& producer = tasks_[input];
      producer.successors.push_back(i);
      if (producer.rank != task.rank) add_once(producer.consumers, task.rank);
    }
    tasks_.push_back(task);
  }
}

// ------------------------------------------------------------------ devices

int OrderModel::new_work() {
  works_.emplace_back();
  return static_cast<int>(works_.size()) - 1;
}

void OrderModel::ask(int work, Pair stream, std::vector<int> waits_for) {
  const auto [last, is_first] = last_of_stream_.try_emplace(stream, work);
  if (!is_first) waits_for.push_back(std::exchange(last->second, work));
  works_[work].waits_for = std::move(waits_for);
  works_[work].is_asked = true;
  if (rule_.num_queues == 0) return;
  const Pair queue{stream.first, number_of(stream.second) % rule_.num_queues};
  const auto [last_there, is_empty] = last_of_queue_.try_emplace(queue, work);
  if (!is_empty) works_[work].ahead = std::exchange(last_there->second, work);
}

OrderModel::Pair OrderModel::send_stream(Pair pair) const {
  if (rule_.one_stream_for_both_ways) return {pair.first, kCopies};
  if (rule_.has_rendezvous) return {pair.first, pair.second};
  return {pair.first, kCopiesOut};
}

OrderModel::Pair OrderModel::receive_stream(Pair pair) const {
  if (rule_.one_stream_for_both_ways) return {pair.second, kCopies};
  // A stream of its own: also ranks that send to themselves would have two.
  if (rule_.has_rendezvous) return {pair.second, num_ranks_ + pair.first};
  return {pair.second, kCopiesIn};
}

// Registers work that a host has asked for and that needs the other rank.
void OrderModel::ask_to_meet(int work, int rank, int peer) {
  works_[work].needs_partner = true;
  works_[work].peer = peer;
  if (!rule_.has_launch_order) return;
  const auto [last, is_first] = last_meeting_.try_emplace(rank, work);
  if (!is_first) works_[work].begins_after = std::exchange(last->second, work);
}

bool OrderModel::has_free_slot(Pair pair) const {
  if (rule_.has_endless_slots) return true;
  if (!rule_.waits_for_last_copy) {
    const auto found = is_full_.find(pair);
    return found == is_full_.end() || !found->second;
  }
  const auto found = last_sent_.find(pair);
  return found == last_sent_.end() || works_[found->second].is_done;
}

// Returns whether work behind this one in its hardware queue may begin.
bool OrderModel::lets_pass(int idx, int peer) const {
  for (; idx >= 0; idx = works_[idx].ahead) {
    const Work& work = works_[idx];
    if (work.is_done) return true;
    if (!rule_.head_blocks_until_over && work.has_begun) return true;
    const bool is_joined =
        rule_.joins_copies_of_pair && peer >= 0 && work.peer == peer;
    if (!is_joined) return false;
  }
  return true;
}

bool OrderModel::can_begin(const Work& work) const {
  return work.is_asked && !work.has_begun && lets_pass(work.ahead, work.peer) &&
         (work.begins_after < 0 || works_[work.begins_after].has_begun) &&
         std::all_of(work.waits_for.begin(), work.waits_for.end(),
                     [this](int other) { return works_[other].is_done; });
}

bool OrderModel::begin_work() {
  for (Work& work : works_) {
    if (!can_begin(work)) continue;
    work.has_begun = true;
    return true;
  }
  return false;
}

bool OrderModel::can_end(const Work& work) const {
  if (!work.has_begun || work.is_done) return false;
  return !work.needs_partner ||
         (work.partner >= 0 && works_[work.partner].has_begun);
}

bool OrderModel::end_work() {
  if (works_.empty()) return false;
  const int begin = pick(static_cast<int>(works_.size()));
  for (size_t i = 0; i < works_.size(); ++i) {
    Work& work = works_[(begin + i) % works_.size()];
    if (!can_end(work)) continue;
    work.is_done = true;
    if (work.needs_partner) works_[work.partner].is_done = true;
    return true;
  }
  return false;
}

// -------------------------------------------------------------------- hosts

bool OrderModel::choose_task() {
  const int begin = pick(static_cast<int>(tasks_.size()));
  for (size_t i = 0; i < tasks_.size(); ++i) {
    const int idx = static_cast<int>((begin + i) % tasks_.size());
    Task& task = tasks_[idx];
    if (task.is_chosen || task.num_missing > 0) continue;
    task.is_chosen = true;
    const int work = new_work();
    if (rule_.header_before_producer) {
      post_results(idx, work);
      late_.emplace_back(idx, work);
    } else {
      ask_for(idx, work);
      post_results(idx, work);
    }
    return true;
  }
  return false;
}

bool OrderModel::ask_for_late_task() {
  if (late_.empty()) return false;
  const auto at = late_.begin() + pick(static_cast<int>(late_.size()));
  const auto [task, work] = *at;
  late_.erase(at);
  ask_for(task, work);
  return true;
}

void OrderModel::ask_for(int idx, int work) {
  const Task& task = tasks_[idx];
  std::vector<int> waits_for;
  for (const int input : task.inputs) {
    waits_for.push_back(tasks_[input].arrived.at(task.rank));
  }
  ask(work, {task.rank, kCompute}, std::move(waits_for));
}

void OrderModel::post_results(int idx, int work) {
  const int rank = tasks_[idx].rank;
  arrive(idx, rank, work);
  for (const int consumer : tasks_[idx].consumers) {
    const Pair pair{rank, consumer};
    const int copy = new_work();
    works_[copy].producer = work;
    std::vector<int> waits_for{work};
    Message message{idx, copy, has_free_slot(pair)};
    if (message.is_on_lane) {
      ++num_over_lanes_;
      is_full_[pair] = true;
      const auto reader = read_by_.find(pair);
      if (reader != read_by_.end()) waits_for.push_back(reader->second);
      last_sent_[pair] = copy;
      if (rule_.has_rendezvous) {
        post_send(pair, copy);
      } else {
        ask(copy, send_stream(pair), std::move(waits_for));
      }
    } else {
      ++num_through_hosts_;
      ask(copy, {rank, kHostOut}, std::move(waits_for));
    }
    leaving_[pair].push_back(message);
  }
}

// Asks for a send, or leaves that for later.
void OrderModel::post_send(Pair pair, int copy) {
  if (rule_.has_turns) {
    if (pair.first < pair.second) without_turn_[pair].push_back(copy);
  } else if (rule_.send_follows_producer) {
    late_sends_[pair].push_back(copy);
  } else {
    ask_for_send(pair, copy);
  }
}

void OrderModel::ask_for_send(Pair pair, int copy) {
  ask_to_meet(copy, pair.first, pair.second);
  ask(copy, send_stream(pair), {works_[copy].producer});
}

bool OrderModel::ask_for_late_send() {
  for (auto& [pair, sends] : late_sends_) {
    const auto [src, dst] = pair;
    if (sends.empty()) continue;
    const int copy = sends.front();
    if (rule_.send_follows_producer && !works_[works_[copy].producer].is_done) {
      continue;
    }
    if (src > dst && !may_begin_turn(src, dst, true)) continue;
    sends.pop_front();
    ask_for_send(pair, copy);
    if (!rule_.has_turns) return true;
    if (src < dst) {
      --turns_[src].num;
    } else {
      receipts_[pair].push_back(copy);
    }
    return true;
  }
  return false;
}

// Returns whether the turn of a copy may begin at a rank: no other copy has its
// turn, or only copies with this peer in this direction.
bool OrderModel::may_begin_turn(int rank, int peer, bool is_send) const {
  if (!rule_.has_turns) return true;
  const auto found = turns_.find(rank);
  if (found == turns_.end() || found->second.num == 0) return true;
  return found->second.peer == peer && found->second.are_sends == is_send;
}

void OrderModel::begin_turn(int rank, int peer, bool is_send) {
  Turns& turns = turns_[rank];
  turns = {peer, is_send, turns.num + 1};
}

bool OrderModel::begin_turn_of_send() {
  for (auto& [pair, sends] : without_turn_) {
    const auto [src, dst] = pair;
    if (sends.empty() || !may_begin_turn(src, dst, true)) continue;
    begin_turn(src, dst, true);
    works_[sends.front()].has_turn = true;
    sends.pop_front();
    return true;
  }
  return false;
}

bool OrderModel::take_receipt() {
  for (auto& [pair, receipts] : receipts_) {
    if (receipts.empty()) continue;
    const auto [from, to] = pair;
    const int copy = receipts.front();
    receipts.pop_front();
    if (works_[copy].is_asked) {
      --turns_[to].num;
    } else {
      late_sends_[{to, from}].push_back(copy);
    }
    return true;
  }
  return false;
}

bool OrderModel::may_leave(Pair pair, const Work& send) const {
  if (rule_.has_turns) return pair.first > pair.second || send.has_turn;
  return !rule_.header_follows_send || send.is_asked;
}

// In order; what the message carries itself has to be there.
bool OrderModel::let_message_leave() {
  for (auto& [pair, queue] : leaving_) {
    if (queue.empty()) continue;
    const Message& first = queue.front();
    if (first.task >= 0 && !first.is_on_lane && !works_[first.copy].is_done) {
      continue;
    }
    if (first.is_on_lane && !may_leave(pair, works_[first.copy])) continue;
    coming_[pair].push_back(first);
    queue.pop_front();
    return true;
  }
  return false;
}

bool OrderModel::take_message() {
  std::vector<Pair> pairs;
  for (const auto& [pair, queue] : coming_) {
    if (queue.empty()) continue;
    if (queue.front().is_on_lane &&
        !may_begin_turn(pair.second, pair.first, false)) {
      continue;
    }
    pairs.push_back(pair);
  }
  if (pairs.empty()) return false;
  const Pair pair = pairs[pick(static_cast<int>(pairs.size()))];
  const Message message = coming_[pair].front();
  coming_[pair].pop_front();
  take(pair, message);
  return true;
}

void OrderModel::take(Pair pair, const Message& message) {
  const auto [src, dst] = pair;
  if (message.task < 0) {
    is_full_[{dst, src}] = false;
    return;
  }
  const int copy = new_work();
  if (!message.is_on_lane) {
    ask(copy, {dst, kHostIn}, {});
  } else if (rule_.has_rendezvous) {
    ask_to_meet(copy, dst, src);
    works_[copy].partner = message.copy;
    works_[message.copy].partner = copy;
    ask(copy, receive_stream(pair), {});
    if (rule_.has_turns) {
      if (dst < src) begin_turn(dst, src, false);
      receipts_[{dst, src}].push_back(message.copy);
    }
  } else {
    ask(copy, receive_stream(pair), {message.copy});
  }
  if (message.is_on_lane) {
    read_by_[pair] = copy;
    coming_[{dst, src}].push_back({});
  }
  arrive(message.task, dst, copy);
}

void OrderModel::arrive(int idx, int rank, int work) {
  tasks_[idx].arrived[rank] = work;
  for (const int successor : tasks_[idx].successors) {
    if (tasks_[successor].rank == rank) --tasks_[successor].num_missing;
  }
}

bool OrderModel::run() {
  using Step = bool (OrderModel::*)();
  constexpr Step kSteps[] = {&OrderModel::choose_task,
                             &OrderModel::ask_for_late_task,
                             &OrderModel::begin_turn_of_send,
                             &OrderModel::ask_for_late_send,
                             &OrderModel::let_message_leave,
                             &OrderModel::take_message,
                             &OrderModel::take_receipt,
                             &OrderModel::begin_work,
                             &OrderModel::end_work};
  constexpr int kNumKinds = std::size(kSteps);
  for (bool has_moved = true; has_moved;) {
    const int first = pick(kNumKinds);
    has_moved = false;
    for (int i = 0; i < kNumKinds && !has_moved; ++i) {
      has_moved = (this->*kSteps[(first + i) % kNumKinds])();
    }
  }
  return std::all_of(tasks_.begin(), tasks_.end(),
                     [](const Task& task) { return task.is_chosen; }) &&
         std::all_of(works_.begin(), works_.end(),
                     [](const Work& work) { return work.is_done; });
}

}  // namespace smp::lanes
