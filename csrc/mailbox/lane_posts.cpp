#include "csrc/mailbox/lane_posts.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <string>
#include <utility>

#include "csrc/common/check.h"
#include "csrc/health/thread_name.h"
#include "csrc/memory/device_scope.h"

namespace smp::mailbox {
namespace {

// Time between two checks of the sending thread for the end of a copy.
constexpr std::chrono::microseconds kAskEvery{50};

// Returns whether the channel's tensors leave their messages. Probes measure
// the lanes.
bool has_lanes(Channel channel) {
  return channel == Channel::kPipeline || channel == Channel::kProbe;
}

// Copies the tensors of a message that waits, as the sender may write to them.
void copy_tensors(Message& message) {
  const at::AutoGradMode no_grad(false);
  for (MessageTensor& tensor : message.tensors) {
    if (!tensor.data.defined() || tensor.lane) continue;
    tensor.data = tensor.data.detach();
    if (!tensor.data.is_cpu()) {
      tensor.data = tensor.data.cpu();
    } else if (!tensor.is_stable) {
      tensor.data = tensor.data.clone();
    }
    tensor.is_stable = true;
  }
}

}  // namespace

LanePosts::LanePosts(const lanes::LaneOptions& options, const LinkOwner& owner,
                     int world_size, Send send)
    : owner_(owner),
      send_(std::move(send)),
      copies_(std::make_shared<lanes::CopyLog>(options.device)),
      peers_(world_size),
      table_(options, owner.global_rank, owner.faults,
             [this](int dst, const lanes::Receipt& receipt) {
               send_receipt(dst, receipt);
             }),
      held_(owner, world_size, [this](Message& message) { take(message); }),
      sender_([this] { send_waiting(); }) {}

LanePosts::~LanePosts() {
  if (sender_.joinable()) stop();  // no mailbox came to be
}

// ----------------------------------------------------------------- sending

void LanePosts::post(int dst, Message message) {
  for (MessageTensor& tensor : message.tensors) {
    tensor.data = memory::MarkedTensor{std::move(tensor.data),
                                       std::exchange(tensor.mark, {})}
                      .use();
  }
  Peer& peer = peers_.at(dst);
  std::lock_guard order(peer.order);
  Waiting waiting{std::move(message)};
  for (MessageTensor& tensor : waiting.message.tensors) {
    if (!has_lanes(waiting.message.channel)) break;
    if (!tensor.data.defined() || !table_.takes(tensor.data)) continue;
    const int64_t asked_ns = copies_->now_if_on();
    lanes::Posted posted = table_.post(dst, tensor.data, tensor.is_stable);
    copies_->add_sent(dst, posted.descriptor, asked_ns, posted.end);
    tensor.lane =
        std::make_shared<const lanes::Descriptor>(std::move(posted.descriptor));
    // The lane's memory has no other user, or the lane marks when writes end.
    tensor.data = std::move(posted.payload.data);
    tensor.is_stable = true;
    if (posted.payload.mark) waiting.marks.push_back(posted.payload.mark);
  }
  bool is_first = false;
  {
    std::lock_guard lock(mutex_);
    is_first = peer.waiting.empty();
  }
  if (is_first && may_leave(dst, waiting)) {
    send_(dst, std::move(waiting.message));
  } else {
    copy_tensors(waiting.message);
    keep(dst, std::move(waiting));
  }
}

bool LanePosts::Waiting::is_ready() const {
  return std::all_of(marks.begin(), marks.end(),
                     [](const memory::Mark& mark) { return mark.is_over(); });
}

// Returns whether the first message to `dst` may leave. It asks for its turn
// when it is ready otherwise: until it has left, other copies of this rank wait
// for the end of the turn.
bool LanePosts::may_leave(int dst, Waiting& first) {
  if (!first.is_ready()) return false;
  if (std::exchange(first.has_asked, true)) return true;
  const auto& tensors = first.message.tensors;
  const auto num_turns = std::count_if(
      tensors.begin(), tensors.end(), [](const MessageTensor& tensor) {
        return tensor.lane && lanes::has_turns(tensor.lane->lane);
      });
  if (num_turns == 0) return true;
  first.marks = {table_.ask_to_leave(dst, static_cast<int>(num_turns))};
  return first.is_ready();
}

void LanePosts::keep(int dst, Waiting waiting) {
  {
    std::lock_guard lock(mutex_);
    peers_[dst].waiting.push_back(std::move(waiting));
    ++num_unsent_;
    owner_.faults->waits().add_unsent(1);
  }
  changed_.notify_one();
}

void LanePosts::send_waiting() {
  health::name_this_thread("smp-lanes");
  memory::enter_device(owner_.device);
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || num_unsent_ > 0; });
    if (stopping_) return;
    bool has_sent = false;
    for (size_t dst = 0; dst < peers_.size() && !stopping_; ++dst) {
      has_sent |= send_first(lock, static_cast<int>(dst));
    }
    if (!has_sent && !stopping_) changed_.wait_for(lock, kAskEvery);
  }
}

// Sends the oldest message that waits for `dst`, if it is ready. It stays in
// the queue until its link has it, so that no other overtakes it.
bool LanePosts::send_first(std::unique_lock<std::mutex>& lock, int dst) {
  std::deque<Waiting>& waiting = peers_[dst].waiting;
  if (waiting.empty() || !may_leave(dst, waiting.front())) return false;
  Message message = std::move(waiting.front().message);
  lock.unlock();
  try {
    send_(dst, std::move(message));
  } catch (const std::exception& error) {
    owner_.faults->report({.kind = health::Fault::Kind::kRaised,
                           .global_rank = owner_.global_rank,
                           .where = "the sending thread of the lanes",
                           .text = error.what()});
  }
  lock.lock();
  waiting.pop_front();
  --num_unsent_;
  owner_.faults->waits().add_unsent(-1);
  return true;
}

void LanePosts::send_receipt(int dst, const lanes::Receipt& receipt) {
  if (closing_ && !lanes::has_turns(receipt.lane)) return;
  Message message;
  message.channel = Channel::kLane;
  message.source_rank = owner_.global_rank;
  message.fields = {static_cast<int64_t>(receipt.lane), receipt.slot,
                    receipt.sequence};
  send_(dst, std::move(message));
}

// --------------------------------------------------------------- receiving

bool LanePosts::receive(Message& message) {
  if (message.channel == Channel::kLane) {
    const auto& f = message.fields;
    table_.acknowledge(message.source_rank, {static_cast<lanes::LaneKind>(f[0]),
                                             static_cast<int32_t>(f[1]), f[2]});
    return false;
  }
  return !held_.hold(message, may_block(message));
}

bool LanePosts::may_block(const Message& message) {
  return std::any_of(message.tensors.begin(), message.tensors.end(),
                     [this](const MessageTensor& tensor) {
                       return tensor.lane &&
                              table_.take_may_block(*tensor.lane);
                     });
}

void LanePosts::take(Message& message) {
  for (MessageTensor& tensor : message.tensors) {
    if (!tensor.lane) continue;
    const int64_t asked_ns = copies_->now_if_on();
    memory::MarkedTensor arrived =
        table_.take(message.source_rank, *tensor.lane, std::move(tensor.data));
    copies_->add_received(message.source_rank, *tensor.lane, asked_ns,
                          arrived.mark);
    tensor.data = std::move(arrived.data);
    tensor.mark = std::move(arrived.mark);
    tensor.lane.reset();
  }
}

// ------------------------------------------------------------------ the end

void LanePosts::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  sender_.join();
  held_.begin_end();
  table_.stop();  // ends a `take` that is blocked
  held_.end();
  for (Peer& peer : peers_) peer.waiting.clear();
  owner_.faults->waits().add_unsent(-num_unsent_.exchange(0));
}

}  // namespace smp::mailbox
