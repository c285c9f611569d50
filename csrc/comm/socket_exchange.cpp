#include "csrc/comm/socket_exchange.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "csrc/common/check.h"

namespace smp::comm {

SocketExchange::SocketExchange(PeerSockets& sockets, const std::string& name,
                               std::vector<int> global_ranks)
    : sockets_(sockets),
      stream_(stream_of(name + "/" + std::to_string(global_ranks.at(0)))),
      global_ranks_(std::move(global_ranks)),
      group_rank_(group_rank_of(sockets_.global_rank())) {
  SMP_CHECK_VALUE(group_rank_ >= 0, "global_rank ", sockets_.global_rank(),
                  " is not in the group '", name, "'");
}

void SocketExchange::start() {
  sockets_.add_receiver(stream_, shared_from_this());
}

int SocketExchange::group_rank_of(int global_rank) const {
  const auto found =
      std::find(global_ranks_.begin(), global_ranks_.end(), global_rank);
  return found == global_ranks_.end()
             ? -1
             : static_cast<int>(found - global_ranks_.begin());
}

void SocketExchange::finish(Transfer& transfer, std::string error) {
  if (transfer.state != State::kRunning) return;
  transfer.state = error.empty() ? State::kSucceeded : State::kFailed;
  transfer.error = std::move(error);
  changed_.notify_all();
}

void SocketExchange::abort() {
  {
    std::lock_guard lock(mutex_);
    aborted_ = true;
    // Finished receives are kept by their callers, who use the memory.
    for (const TransferPtr& receive : receives_) finish(*receive, "aborted");
    for (auto& [source, open] : open_) {
      if (open.receive) finish(*open.receive, "aborted");
    }
    for (auto& [raw, transfer] : sends_) finish(*transfer, "aborted");
    receives_.clear();
    changed_.notify_all();
  }
  sockets_.remove_receiver(stream_);
}

bool SocketExchange::is_aborted() const {
  std::lock_guard lock(mutex_);
  return aborted_;
}

void SocketExchange::abort(const TransferPtr& transfer) {
  std::lock_guard lock(mutex_);
  transfer->is_aborted = true;
  receives_.remove(transfer);
  finish(*transfer, "aborted");
}

// ------------------------------------------------------------------- sending

SocketExchange::TransferPtr SocketExchange::send(int dst, uint64_t tag,
                                                 uint64_t note,
                                                 const void* data, size_t size,
                                                 Owner owner) {
  auto transfer = std::make_shared<Transfer>();
  transfer->peer = dst;
  transfer->tag = tag;
  {
    std::lock_guard lock(mutex_);
    if (aborted_) {
      finish(*transfer, "aborted");
      return transfer;
    }
    sends_.emplace(transfer.get(), transfer);
  }
  std::vector<PeerSockets::Outgoing> frames(1);
  frames[0].tag = tag;
  frames[0].note = note;
  frames[0].pieces.push_back(
      {std::move(owner), static_cast<const uint8_t*>(data), size});
  sockets_.post(
      global_ranks_.at(dst), stream_, std::move(frames),
      [self = shared_from_this(), transfer](const std::string& why) {
        std::lock_guard lock(self->mutex_);
        self->sends_.erase(transfer.get());
        self->finish(
            *transfer,
            why.empty()
                ? ""
                : text_of_lost(transfer->peer,
                               self->global_ranks_[transfer->peer], why));
      });
  return transfer;
}

// ----------------------------------------------------------------- receiving

SocketExchange::TransferPtr SocketExchange::receive(int src, uint64_t tag,
                                                    uint64_t note, void* to,
                                                    size_t size, Owner owner) {
  auto transfer = std::make_shared<Transfer>();
  transfer->peer = src;
  transfer->tag = tag;
  transfer->note = note;
  transfer->to = static_cast<uint8_t*>(to);
  transfer->size = size;
  transfer->owner = std::move(owner);
  std::lock_guard lock(mutex_);
  if (aborted_) {
    finish(*transfer, "aborted");
  } else if (!take_arrival(*transfer)) {
    const auto why = lost_.find(src);
    if (why != lost_.end()) {
      finish(*transfer, why->second);
    } else {
      receives_.push_back(transfer);
    }
  }
  return transfer;
}

// Takes the oldest message that fits, if all of it is there. A message that is
// still coming in is taken when it ends.
bool SocketExchange::take_arrival(Transfer& receive) {
  for (auto one = arrivals_.begin(); one != arrivals_.end(); ++one) {
    if (one->tag != receive.tag || receive.peer != one->source) continue;
    if (!one->is_complete) return false;
    if (fits(receive, one->note, one->bytes.size())) {
      if (!one->bytes.empty()) {
        std::memcpy(receive.to, one->bytes.data(), one->bytes.size());
      }
      finish(receive);
    }
    arrivals_.erase(one);
    return true;
  }
  return false;
}

// Returns the first receive that was posted for such a message.
SocketExchange::TransferPtr SocketExchange::match(int source, uint64_t tag) {
  for (auto one = receives_.begin(); one != receives_.end(); ++one) {
    const TransferPtr receive = *one;
    if (receive->tag == tag && receive->peer == source) {
      receives_.erase(one);
      return receive;
    }
  }
  return nullptr;
}

bool SocketExchange::fits(Transfer& receive, uint64_t note, size_t size) const {
  if (receive.note == note && receive.size == size) return true;
  receive.does_not_fit = true;
  receive.other_note = note;
  receive.other_size = size;
  receive.state = State::kFailed;
  receive.error = "does not fit";
  return false;
}

uint8_t* SocketExchange::begin(const PeerSockets::Frame& frame) {
  const int source = group_rank_of(frame.source_rank);
  SMP_CHECK(source >= 0, "a message from global_rank ", frame.source_rank,
            ", which is not in the group");
  std::lock_guard lock(mutex_);
  Open& open = open_[source];
  open = {};
  open.receive = aborted_ ? nullptr : match(source, frame.tag);
  if (open.receive) {
    if (fits(*open.receive, frame.note, frame.size)) {
      return open.receive->to;
    }
    changed_.notify_all();
    open.receive = nullptr;
  } else if (!aborted_) {
    Arrival& arrival = arrivals_.emplace_back(
        Arrival{source, frame.tag, frame.note, {}, false});
    arrival.bytes.resize(frame.size);
    open.arrival = &arrival;
    return arrival.bytes.data();
  }
  open.unwanted.resize(frame.size);
  return open.unwanted.data();
}

void SocketExchange::end(const PeerSockets::Frame& frame) {
  const int source = group_rank_of(frame.source_rank);
  std::lock_guard lock(mutex_);
  const auto found = open_.find(source);
  const Open open = std::move(found->second);
  open_.erase(found);
  if (open.receive) return finish(*open.receive);
  if (open.arrival == nullptr) return;
  open.arrival->is_complete = true;
  // A receive may have been posted meanwhile.
  if (const TransferPtr receive = match(source, frame.tag)) {
    take_arrival(*receive);
    changed_.notify_all();
  }
}

void SocketExchange::lost(int global_rank, const std::string& why) {
  const int source = group_rank_of(global_rank);
  if (source < 0) return;
  std::lock_guard lock(mutex_);
  const std::string text = text_of_lost(source, global_rank, why);
  lost_.emplace(source, text);
  if (const auto open = open_.find(source); open != open_.end()) {
    if (open->second.receive) finish(*open->second.receive, text);
    if (Arrival* const partial = open->second.arrival) {
      arrivals_.remove_if([&](const Arrival& one) { return &one == partial; });
    }
    open_.erase(open);
  }
  for (auto one = receives_.begin(); one != receives_.end();) {
    if ((*one)->peer == source) {
      finish(**one, text);
      one = receives_.erase(one);
    } else {
      ++one;
    }
  }
}

// ------------------------------------------------------------------- waiting

bool SocketExchange::wait_until(
    Transfer& transfer, std::chrono::steady_clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, deadline,
                             [&] { return transfer.state != State::kRunning; });
}

bool SocketExchange::is_over(const Transfer& transfer) const {
  std::lock_guard lock(mutex_);
  return transfer.state != State::kRunning;
}

std::string text_of_lost(int group_rank, int global_rank,
                         const std::string& why) {
  return detail::concat("the connection to group rank ", group_rank,
                        " (global_rank ", global_rank, ") broke: ", why);
}

}  // namespace smp::comm
