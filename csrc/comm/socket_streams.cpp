#include "csrc/comm/socket_streams.h"

#include <algorithm>
#include <deque>
#include <utility>
#include <vector>

#include "csrc/common/check.h"

namespace smp::comm {
namespace {

// Keeps frames of a stream that has no receiver yet, then delivers them.
class EarlyFrames final : public PeerSockets::Receiver {
 public:
  uint8_t* begin(const PeerSockets::Frame& frame) override {
    std::lock_guard lock(mutex_);
    if (target_) {
      open_[frame.source_rank] = nullptr;
      return target_->begin(frame);
    }
    Kept& kept = frames_.emplace_back(Kept{frame, {}});
    kept.bytes.resize(frame.size);
    open_[frame.source_rank] = &kept;
    return kept.bytes.data();
  }

  void end(const PeerSockets::Frame& frame) override {
    std::lock_guard lock(mutex_);
    Kept* const kept = open_.at(frame.source_rank);
    open_.erase(frame.source_rank);
    if (kept == nullptr) return target_->end(frame);
    kept->is_complete = true;
    if (target_) hand_on(*kept);
  }

  void lost(int, const std::string&) override {}

  void hand_on_to(std::shared_ptr<PeerSockets::Receiver> target) {
    std::lock_guard lock(mutex_);
    target_ = std::move(target);
    for (const Kept& kept : frames_) {
      if (kept.is_complete) hand_on(kept);
    }
    while (!frames_.empty() && frames_.front().is_complete) {
      frames_.pop_front();
    }
  }

 private:
  struct Kept {
    PeerSockets::Frame frame;
    std::vector<uint8_t> bytes;
    bool is_complete = false;
  };

  void hand_on(const Kept& kept) {
    uint8_t* const to = target_->begin(kept.frame);
    std::copy(kept.bytes.begin(), kept.bytes.end(), to);
    target_->end(kept.frame);
  }

  std::mutex mutex_;
  std::deque<Kept> frames_;    // stay where they are
  std::map<int, Kept*> open_;  // by source; null: the target has it
  std::shared_ptr<PeerSockets::Receiver> target_;
};

// Drops the frames of a stream that is over.
class DiscardedFrames final : public PeerSockets::Receiver {
 public:
  uint8_t* begin(const PeerSockets::Frame& frame) override {
    auto& bytes = bytes_[frame.source_rank];
    bytes.resize(frame.size);
    return bytes.data();
  }
  void end(const PeerSockets::Frame& frame) override {
    bytes_.erase(frame.source_rank);
  }
  void lost(int, const std::string&) override {}

 private:
  std::map<int, std::vector<uint8_t>> bytes_;
};

}  // namespace

std::shared_ptr<SocketStreams::Receiver> SocketStreams::receiver_of(
    uint64_t stream) {
  std::lock_guard lock(mutex_);
  std::shared_ptr<Receiver>& receiver = receivers_[stream];
  if (!receiver) receiver = std::make_shared<EarlyFrames>();
  return receiver;
}

void SocketStreams::add(uint64_t stream, std::shared_ptr<Receiver> receiver) {
  const std::shared_ptr<Receiver> before = receiver_of(stream);
  auto* const early = dynamic_cast<EarlyFrames*>(before.get());
  SMP_ASSERT(early != nullptr, "a stream has two receivers");
  early->hand_on_to(receiver);
  std::map<int, std::string> lost_before;
  {
    std::lock_guard lock(mutex_);
    receivers_[stream] = receiver;
    lost_before = lost_;
  }
  for (const auto& [peer, why] : lost_before) receiver->lost(peer, why);
}

void SocketStreams::remove(uint64_t stream) {
  std::lock_guard lock(mutex_);
  receivers_[stream] = std::make_shared<DiscardedFrames>();
}

void SocketStreams::clear() {
  std::lock_guard lock(mutex_);
  receivers_.clear();
}

void SocketStreams::lose(int global_rank, const std::string& why) {
  std::vector<std::shared_ptr<Receiver>> receivers;
  {
    std::lock_guard lock(mutex_);
    if (!lost_.emplace(global_rank, why).second) return;
    for (const auto& [stream, receiver] : receivers_)
      receivers.push_back(receiver);
  }
  for (const auto& receiver : receivers) receiver->lost(global_rank, why);
}

}  // namespace smp::comm
