#include "csrc/mailbox/socket_link.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <span>
#include <utility>

#include "csrc/common/check.h"
#include "csrc/health/socket.h"
#include "csrc/memory/device_scope.h"

namespace smp::mailbox {
namespace {

using std::chrono::milliseconds;

// Tags of the first frame of a message, and of each of its large tensors.
constexpr uint64_t kHeadTag = 0;
constexpr uint64_t kTensorTag = 1;
// Time for the liveness channel to report why a connection broke.
constexpr milliseconds kExplainGrace{1000};
constexpr milliseconds kExplainEvery{20};

comm::PeerSockets::Piece piece_of_tensor(at::Tensor tensor) {
  auto owner = std::make_shared<at::Tensor>(std::move(tensor));
  const auto* data = static_cast<const uint8_t*>(owner->const_data_ptr());
  const size_t size = owner->nbytes();
  return {std::move(owner), data, size};
}

uint64_t mailbox_stream() {
  static const uint64_t stream = comm::stream_of("mailbox");
  return stream;
}

}  // namespace

// Receives frames; outlives the link, because the sockets may be inside of it.
class SocketLink::Incoming final : public comm::PeerSockets::Receiver {
 public:
  explicit Incoming(SocketLink& link) : link_(&link), told_(&link) {}

  /// Ends deliveries and reports; none is running when this returns.
  void stop() {
    {
      std::lock_guard lock(mutex_);
      link_ = nullptr;
    }
    std::lock_guard lock(told_mutex_);
    told_ = nullptr;
  }

  /// Notes that a message was sent, or will never be.
  void sent(int dst, const std::string& error) {
    std::lock_guard lock(told_mutex_);
    if (told_ == nullptr) return;
    told_->add_unsent(-1);
    if (!error.empty()) told_->report_lost(dst, error);
  }

  uint8_t* begin(const comm::PeerSockets::Frame& frame) override {
    std::lock_guard lock(mutex_);
    Partial& partial = partials_[frame.source_rank];
    if (link_ == nullptr || partial.is_broken ||
        frame.tag != expected_tag(partial)) {
      partial.is_broken = true;
    } else if (frame.tag == kTensorTag) {
      const at::Tensor& tensor = partial.large[partial.num_read];
      if (tensor.nbytes() == frame.size) {
        return tensor.mutable_data_ptr<uint8_t>();
      }
      partial.is_broken = true;
    }
    if (partial.is_broken && link_ != nullptr && !partial.is_reported) {
      partial.is_reported = true;
      link_->report_corrupt(detail::concat(
          "message from global_rank ", frame.source_rank,
          " is corrupt: its parts came in another order, or have other sizes; "
          "ranks that run different versions of smp cannot work together"));
    }
    partial.head.resize(frame.size);
    return partial.head.data();
  }

  void end(const comm::PeerSockets::Frame& frame) override {
    std::lock_guard lock(mutex_);
    Partial& partial = partials_[frame.source_rank];
    if (link_ == nullptr || partial.is_broken) return;
    if (!is_entered_) {  // handlers may allocate on the device of this rank
      is_entered_ = true;
      memory::enter_device(link_->owner_.device);
    }
    try {
      if (frame.tag == kTensorTag) {
        ++partial.num_read;
      } else {
        read_head(partial, frame.source_rank);
      }
      if (partial.num_read < partial.large.size()) return;
      partial.large.clear();
      partial.num_read = 0;
      link_->count_received(partial.num_bytes);
      link_->owner_.deliver(std::exchange(partial.header, {}).message);
    } catch (const wire::CorruptMessage& error) {
      partial.is_broken = partial.is_reported = true;
      link_->report_corrupt(error.what());
    }
  }

  void lost(int global_rank, const std::string& why) override {
    std::lock_guard lock(told_mutex_);
    if (told_ != nullptr && told_->peers_.contains(global_rank)) {
      told_->report_lost(global_rank, why);
    }
  }

 private:
  // The message of one rank that is coming in.
  struct Partial {
    uint64_t next_sequence = 0;
    std::vector<uint8_t> head;
    wire::Header header;
    std::vector<at::Tensor> large;
    size_t num_read = 0;  // of `large`
    int64_t num_bytes = 0;
    bool is_broken = false;
    bool is_reported = false;
  };

  static uint64_t expected_tag(const Partial& partial) {
    return partial.large.empty() ? kHeadTag : kTensorTag;
  }

  void read_head(Partial& partial, int source) {
    const std::span<const uint8_t> head(partial.head);
    SMP_THROW_IF_NOT(wire::CorruptMessage, head.size() >= wire::kHeaderBytes,
                     "message from global_rank ", source, " is corrupt: only ",
                     head.size(), " bytes");
    partial.header =
        wire::decode_header(head.first(wire::kHeaderBytes), source);
    wire::check_sequence(partial.header, partial.next_sequence++,
                         "the connection");
    partial.large = wire::decode_blob(head.subspan(wire::kHeaderBytes),
                                      partial.header, link_->owner_.lanes);
    partial.num_bytes =
        static_cast<int64_t>(head.size()) + partial.header.large_bytes;
  }

  std::mutex mutex_;  // held while a handler runs
  SocketLink* link_;
  bool is_entered_ = false;
  std::map<int, Partial> partials_;  // by source rank
  std::mutex told_mutex_;  // of threads that post, too, with their locks
  SocketLink* told_;
};

SocketLink::SocketLink(std::shared_ptr<comm::PeerSockets> sockets,
                       const std::vector<int>& peers, LinkOwner owner)
    : Link(std::move(owner)), sockets_(std::move(sockets)) {
  for (const int peer : peers) peers_.try_emplace(peer);
  incoming_ = std::make_shared<Incoming>(*this);
  sockets_->add_receiver(mailbox_stream(), incoming_);
}

void SocketLink::post(int dst, Message message) {
  at::NoGradGuard no_grad;
  wire::Parts parts = wire::take_apart(message);
  auto head = std::make_shared<std::vector<uint8_t>>(
      parts.header.size() + static_cast<size_t>(parts.blob_bytes));
  wire::write_blob(message, parts, head->data() + parts.header.size());
  std::vector<comm::PeerSockets::Outgoing> frames(1 + parts.large.size());
  frames[0].tag = kHeadTag;
  frames[0].pieces.push_back({head, head->data(), head->size()});
  for (size_t i = 0; i < parts.large.size(); ++i) {
    const wire::Parts::Large& one = parts.large[i];
    frames[1 + i].tag = kTensorTag;
    frames[1 + i].pieces.push_back(
        piece_of_tensor(one.is_callers ? one.data.clone() : one.data));
  }
  add_unsent(1);
  Peer& peer = peers_.at(dst);
  {
    std::lock_guard lock(peer.mutex);
    wire::set_sequence(parts.header.data(), peer.next_sequence++);
    std::copy(parts.header.begin(), parts.header.end(), head->begin());
    sockets_->post(dst, mailbox_stream(), std::move(frames),
                   [incoming = incoming_, dst](const std::string& error) {
                     incoming->sent(dst, error);
                   });
  }
  count_sent(parts.num_bytes());
}

// Reports a lost peer after a delay. If it was killed, raised or left, the
// liveness channel reports so within milliseconds, with a better reason.
void SocketLink::report_lost(int peer, const std::string& text) {
  std::lock_guard lock(mutex_);
  if (stopping_) return;
  losses_.push_back({peer, text, Clock::now() + kExplainGrace});
  if (!watch_.joinable()) watch_ = std::thread([this] { watch_losses(); });
  changed_.notify_all();
}

void SocketLink::watch_losses() {
  begin_thread("smp-losses");
  health::FaultBoard& faults = *owner_.faults;
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    if (losses_.empty()) {
      changed_.wait(lock);
      continue;
    }
    changed_.wait_for(lock, kExplainEvery);
    std::vector<Loss> unexplained;
    std::erase_if(losses_, [&](const Loss& loss) {
      if (faults.fault().has_value() || faults.has_left(loss.global_rank)) {
        return true;
      }
      if (Clock::now() < loss.explained_by) return false;
      unexplained.push_back(loss);
      return true;
    });
    if (stopping_) return;
    lock.unlock();
    for (const Loss& loss : unexplained) {
      using Kind = health::Fault::Kind;
      const bool is_unreachable = loss.text == health::unreachable_text();
      faults.report({.kind = is_unreachable ? Kind::kUnreachable : Kind::kDied,
                     .global_rank = loss.global_rank,
                     .text = loss.text});
    }
    lock.lock();
  }
}

void SocketLink::stop() {
  sockets_->remove_receiver(mailbox_stream());
  incoming_->stop();
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (watch_.joinable()) watch_.join();
  forget_unsent();
}

}  // namespace smp::mailbox
