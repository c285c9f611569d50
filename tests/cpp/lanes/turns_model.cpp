#include "tests/cpp/lanes/turns_model.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace smp::lanes {
namespace {

constexpr int kNumChannels = 2;  // of a pair in one direction
// One of so many tries of a slow thread is made.
constexpr uint64_t kSlowness[] = {1, 1, 10, 100};

}  // namespace

TurnsModel::TurnsModel(uint64_t seed, TurnsRule rule)
    : rule_(rule), random_(seed) {
  num_ranks_ = 2 + pick(3);
  programs_.resize(num_ranks_);
  devices_.resize(num_ranks_);
  ready_.resize(num_ranks_);
  num_parts_done_.resize(num_ranks_);
  is_inbox_locked_.resize(num_ranks_);
  for (int rank = 0; rank < num_ranks_; ++rank) {
    turns_.push_back(std::make_unique<CopyTurns>(rank));
    takers_.push_back({.rank = rank});
  }
  make_messages();
  make_actors();
}

// Returns an earlier message to a rank, or -1.
int TurnsModel::pick_arrival(int rank, bool needs_tensors) {
  std::vector<int> found;
  for (size_t i = 0; i < messages_.size(); ++i) {
    const Message& message = messages_[i];
    if (message.pair.second != rank) continue;
    if (needs_tensors && message.num_tensors == 0) continue;
    found.push_back(static_cast<int>(i));
  }
  return found.empty() ? -1 : found[pick(static_cast<int>(found.size()))];
}

// A message depends on earlier ones only.
void TurnsModel::make_messages() {
  const int num_messages = 4 + pick(20);
  for (int i = 0; i < num_messages; ++i) {
    Message message;
    const int src = pick(num_ranks_);
    message.pair = {src, (src + 1 + pick(num_ranks_ - 1)) % num_ranks_};
    message.num_tensors = pick(3);
    message.is_of_program = pick(2) == 0;
    if (!message.is_of_program || pick(2) == 0) {
      message.data = pick_arrival(src, true);
    }
    if (message.data < 0) {
      message.is_of_program = true;
    } else {
      message.num_tensors = std::max(message.num_tensors, 1);
    }
    if (message.is_of_program) {
      programs_[src].push_back(i);
    } else {
      message.trigger = pick_arrival(src, false);
    }
    messages_.push_back(std::move(message));
  }
}

void TurnsModel::add_actor(std::function<bool()> step) {
  actors_.push_back(
      {std::move(step), kSlowness[pick(int{std::size(kSlowness)})]});
}

void TurnsModel::make_actors() {
  for (int rank = 0; rank < num_ranks_; ++rank) {
    add_actor([this, rank] { return run_program(rank); });
    add_actor([this, rank] { return take(rank); });
    add_actor([this, rank] { return send(rank); });
    add_actor([this, rank] { return end_copy(rank); });
    for (int peer = 0; peer < num_ranks_; ++peer) {
      if (peer == rank) continue;
      receivers_[{peer, rank}].rank = rank;
      add_actor([this, rank, peer] { return let_message_leave({rank, peer}); });
      add_actor([this, rank, peer] { return receive({peer, rank}); });
    }
  }
}

// ------------------------------------------------------------------- sending

bool TurnsModel::are_over(int idx) const {
  const Message& message = messages_[idx];
  return message.is_handled &&
         std::all_of(message.copies.begin(), message.copies.end(),
                     [this](int copy) { return copies_[copy].is_over; });
}

// Returns a channel whose last copy is over, or -1.
int TurnsModel::find_channel(Pair pair) const {
  for (int channel = 0; channel < kNumChannels; ++channel) {
    const bool is_free =
        std::none_of(copies_.begin(), copies_.end(), [&](const Copy& copy) {
          return copy.pair == pair && copy.channel == channel &&
                 !(copy.is_over && copy.has_end);
        });
    if (is_free) return channel;
  }
  return -1;
}

int TurnsModel::new_copy(Pair pair, int num_parts) {
  copies_.push_back({.pair = pair, .num_missing = num_parts});
  return static_cast<int>(copies_.size()) - 1;
}

void TurnsModel::enqueue(int rank, int copy) {
  --copies_[copy].num_missing;
  devices_[rank].push_back(copy);
}

// Posts without waiting. A tensor that finds no channel goes through the host.
void TurnsModel::post(int idx) {
  Message& message = messages_[idx];
  message.is_posted = true;
  for (int i = 0; i < message.num_tensors; ++i) {
    const int channel = find_channel(message.pair);
    if (channel >= 0) {
      message.copies.push_back(new_copy(message.pair, 2));
      copies_.back().channel = channel;
    } else if (message.host_work < 0) {
      const int rank = message.pair.first;
      message.host_work = new_copy({rank, rank}, 1);
      enqueue(rank, message.host_work);
    }
  }
  leaving_[message.pair].push_back(idx);
}

bool TurnsModel::run_program(int rank) {
  if (programs_[rank].empty()) return false;
  const int idx = programs_[rank].front();
  const int data = messages_[idx].data;
  if (data >= 0 && !are_over(data)) return false;
  programs_[rank].pop_front();
  post(idx);
  return true;
}

void TurnsModel::ask_for_turn(int idx) {
  Message& message = messages_[idx];
  if (std::exchange(message.has_asked, true)) return;
  if (message.copies.empty() || rule_.turns_overlap) {
    *message.may_leave = true;
    return;
  }
  turns_[message.pair.first]->add_message(
      message.pair.second, static_cast<int>(message.copies.size()),
      [may_leave = message.may_leave] { *may_leave = true; });
}

bool TurnsModel::let_message_leave(Pair pair) {
  auto& leaving = leaving_[pair];
  if (leaving.empty()) return false;
  const int idx = leaving.front();
  Message& message = messages_[idx];
  if (message.host_work >= 0 && !copies_[message.host_work].is_over) {
    return false;
  }
  const bool had_asked = message.has_asked;
  ask_for_turn(idx);
  if (!*message.may_leave) return !had_asked;
  leaving.pop_front();
  links_[pair].push_back({.message = idx});
  return true;
}

// Takes a step of the thread that sends.
bool TurnsModel::send(int rank) {
  if (ready_[rank].empty()) return false;
  constexpr Part kParts[] = {Part::kEnqueue, Part::kReceipt, Part::kEnd,
                             Part::kTurn};
  constexpr Part kOtherParts[] = {Part::kEnqueue, Part::kEnd, Part::kReceipt,
                                  Part::kTurn};
  size_t& num_done = num_parts_done_[rank];
  const auto& parts = rule_.receipt_follows_end ? kOtherParts : kParts;
  do_part(rank, ready_[rank].front(), parts[num_done]);
  if (++num_done == std::size(parts)) {
    num_done = 0;
    ready_[rank].pop_front();
  }
  return true;
}

void TurnsModel::do_part(int rank, int copy, Part part) {
  const int dst = copies_[copy].pair.second;
  switch (part) {
    case Part::kEnqueue:
      return enqueue(rank, copy);
    case Part::kReceipt:
      if (dst < rank && !rule_.turns_overlap) {
        links_[{rank, dst}].push_back({.receipt_of = copy});
      }
      return;
    case Part::kEnd:
      copies_[copy].has_end = true;
      return;
    case Part::kTurn:
      if (!rule_.turns_overlap) turns_[rank]->sent();
      return;
  }
}

// ----------------------------------------------------------------- receiving

// Takes a step of the thread that brings what comes over a link.
bool TurnsModel::receive(Pair pair) {
  Thread& thread = receivers_[pair];
  if (thread.stage != Stage::kIdle) return handle(thread);
  auto& letters = links_[pair];
  if (letters.empty()) return false;
  const Letter letter = letters.front();
  letters.pop_front();
  if (letter.receipt_of >= 0) {
    take_receipt(pair.second, pair.first, letter.receipt_of);
  } else if (held_[pair].empty() && messages_[letter.message].copies.empty()) {
    thread.message = letter.message;
    thread.stage = Stage::kWantsInbox;
  } else {
    held_[pair].push_back(letter.message);
  }
  return true;
}

void TurnsModel::take_receipt(int rank, int from, int copy) {
  const auto send = [this, rank, copy] { ready_[rank].push_back(copy); };
  if (rule_.turns_overlap) return send();
  const Copy& what = copies_[copy];
  // The lane refuses the receipt of a copy that is not its channel's last one.
  const bool is_senders = what.pair.second == rank;
  if (is_senders && taken_.at({what.pair, what.channel}) != copy) return;
  turns_[rank]->add_receipt(from, send);
}

// Takes a step of the thread that takes tensors and handles their messages.
bool TurnsModel::take(int rank) {
  Thread& thread = takers_[rank];
  switch (thread.stage) {
    case Stage::kIdle:
      return begin_take(thread);
    case Stage::kTakes:
      return take_next(thread);
    default:
      return handle(thread);
  }
}

bool TurnsModel::begin_take(Thread& thread) {
  const int first = pick(num_ranks_);
  for (int i = 0; i < num_ranks_; ++i) {
    const auto& held = held_[{(first + i) % num_ranks_, thread.rank}];
    if (held.empty()) continue;
    thread.message = held.front();  // stays in the queue
    thread.stage = Stage::kTakes;
    thread.num_taken = 0;
    return true;
  }
  return false;
}

bool TurnsModel::take_next(Thread& thread) {
  const Message& message = messages_[thread.message];
  if (thread.num_taken == message.copies.size()) {
    thread.stage = Stage::kWantsInbox;
    return true;
  }
  if (!thread.turn) {
    thread.turn = std::make_shared<bool>(rule_.turns_overlap);
    if (!rule_.turns_overlap) {
      turns_[thread.rank]->add_receive(message.pair.first,
                                       [turn = thread.turn] { *turn = true; });
    }
    return true;
  }
  if (!*thread.turn) return false;
  thread.turn.reset();
  take_tensor(thread);
  return true;
}

void TurnsModel::take_tensor(Thread& thread) {
  const Message& message = messages_[thread.message];
  const auto [src, dst] = message.pair;
  const int copy = message.copies[thread.num_taken++];
  enqueue(dst, copy);
  taken_[{message.pair, copies_[copy].channel}] = copy;
  links_[{dst, src}].push_back({.receipt_of = copy});
  if (!rule_.turns_overlap) turns_[dst]->received(src);
}

// ------------------------------------------------------------------ handlers

// Takes a step of a handler, one of which runs at a time. It forwards tensors
// when their copies are over.
bool TurnsModel::handle(Thread& thread) {
  if (thread.stage == Stage::kWantsInbox) {
    if (is_inbox_locked_[thread.rank]) return false;
    begin_handling(thread);
    return true;
  }
  if (thread.pushes.empty()) {
    end_handling(thread);
    return true;
  }
  const int push = thread.pushes.front();
  if (!are_over(messages_[push].data)) return false;
  thread.pushes.pop_front();
  post(push);
  return true;
}

void TurnsModel::begin_handling(Thread& thread) {
  is_inbox_locked_[thread.rank] = true;
  thread.stage = Stage::kHandles;
  messages_[thread.message].is_handled = true;
  for (size_t i = 0; i < messages_.size(); ++i) {
    Message& message = messages_[i];
    if (message.pair.first != thread.rank || message.is_of_program) continue;
    if (message.is_pushed || !messages_[message.data].is_handled ||
        !messages_[message.trigger].is_handled) {
      continue;
    }
    message.is_pushed = true;
    thread.pushes.push_back(static_cast<int>(i));
  }
}

void TurnsModel::end_handling(Thread& thread) {
  is_inbox_locked_[thread.rank] = false;
  thread.stage = Stage::kIdle;
  auto& held = held_[messages_[thread.message].pair];
  if (!held.empty() && held.front() == thread.message) held.pop_front();
}

// ------------------------------------------------------------------- devices

bool TurnsModel::end_copy(int rank) {
  if (devices_[rank].empty()) return false;
  Copy& copy = copies_[devices_[rank].front()];
  if (copy.num_missing > 0) return false;
  const int first = devices_[rank].front();
  for (const int end : {copy.pair.first, copy.pair.second}) {
    if (devices_[end].front() != first) return false;
  }
  devices_[copy.pair.first].pop_front();
  if (copy.pair.second != copy.pair.first) {
    devices_[copy.pair.second].pop_front();
  }
  copy.is_over = true;
  return true;
}

// Lets one actor move. @return false if none can
bool TurnsModel::step(bool may_be_late) {
  const auto num_actors = static_cast<int>(actors_.size());
  const int first = pick(num_actors);
  for (int i = 0; i < num_actors; ++i) {
    const Actor& actor = actors_[(first + i) % num_actors];
    if (may_be_late && random_() % actor.slowness != 0) continue;
    if (actor.step()) return true;
  }
  return false;
}

bool TurnsModel::run() {
  while (step(true) || step(false)) {
  }
  return std::all_of(messages_.begin(), messages_.end(),
                     [](const Message& message) {
                       return message.is_posted && message.is_handled;
                     }) &&
         std::all_of(copies_.begin(), copies_.end(),
                     [](const Copy& copy) { return copy.is_over; });
}

}  // namespace smp::lanes
