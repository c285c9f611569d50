#include "csrc/mailbox/communicator_link.h"

#include <ATen/ops/empty.h>

#include <array>
#include <exception>
#include <span>
#include <utility>

#include "csrc/common/check.h"

namespace smp::mailbox {
namespace {

using std::chrono::milliseconds;

constexpr int kPacketTag = 1;
constexpr int kPayloadTag = 2;
constexpr auto kForever = std::chrono::hours(24 * 365);
// Time for the liveness channel to report why a connection broke.
constexpr milliseconds kReasonGrace{1000};
// Time after which messages to a rank that has left are given up.
constexpr milliseconds kSendGrace{2000};
// Time after which finished sends are collected, many at a time.
constexpr milliseconds kCollectEvery{1};
constexpr milliseconds kSendSlice{200};

at::Tensor new_bytes(int64_t size) {
  return at::empty({size}, at::TensorOptions(at::kByte));
}

std::span<const uint8_t> view_of(const at::Tensor& bytes) {
  return {bytes.const_data_ptr<uint8_t>(), bytes.nbytes()};
}

// Returns whether `work` finishes within `slice`; throws its error. Work has
// one type of error for a time-out and a failure; only a failure comes early.
bool finished_within(comm::Work& work, milliseconds slice) {
  const auto begin = std::chrono::steady_clock::now();
  try {
    work.wait(slice);
    return true;
  } catch (const Error&) {
    if (std::chrono::steady_clock::now() - begin < slice) throw;
    return false;
  }
}

// A send that could not begin. It becomes a fault in the collecting thread, so
// that the caller need not wait for the reason.
class FailedWork final : public comm::Work {
 public:
  explicit FailedWork(std::string text) : text_(std::move(text)) {}
  bool done() override { return true; }
  void wait(milliseconds) override { throw Error(text_); }

 private:
  const std::string text_;
};

// Ends a receive because of stop(), not because of a failure.
struct Closing {};

}  // namespace

CommunicatorLink::CommunicatorLink(comm::CommunicatorPtr world,
                                   const std::vector<int>& peers,
                                   LinkOwner owner)
    : Link(std::move(owner)), world_(std::move(world)) {
  for (const int peer : peers) peers_.try_emplace(peer);
  threads_.emplace_back([this] { collect_sends(); });
  for (const int peer : peers) {
    threads_.emplace_back([this, peer] { receive_from(peer); });
  }
}

// ----------------------------------------------------------------- sending

void CommunicatorLink::post(int dst, Message message) {
  const wire::Encoded encoded = wire::encode(message);
  const int64_t num_bytes = encoded.num_bytes();
  Outgoing outgoing{{}, Clock::now()};
  Peer& peer = peers_.at(dst);
  {
    std::lock_guard peer_lock(peer.mutex);
    wire::set_sequence(encoded.packet.mutable_data_ptr<uint8_t>(),
                       peer.next_sequence++);
    issue(dst, encoded, outgoing);
    std::lock_guard lock(mutex_);
    peer.sends.push_back(std::move(outgoing));
    ++num_uncollected_;
    add_unsent(1);
    if (std::exchange(collector_sleeps_, false)) changed_.notify_all();
  }
  count_sent(num_bytes);
}

void CommunicatorLink::issue(int dst, const wire::Encoded& encoded,
                             Outgoing& outgoing) {
  try {
    auto& works = outgoing.works;
    works.push_back(world_->send(encoded.packet, dst, kPacketTag));
    if (encoded.blob.defined()) {
      works.push_back(world_->send(encoded.blob, dst, kPayloadTag));
    }
    for (const at::Tensor& tensor : encoded.large) {
      works.push_back(world_->send(tensor, dst, kPayloadTag));
    }
  } catch (const Error& error) {
    outgoing.works.push_back(std::make_shared<FailedWork>(error.what()));
  }
}

void CommunicatorLink::collect_sends() {
  begin_thread("smp-send");
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] {
      collector_sleeps_ = num_uncollected_ == 0;
      return stopping_ || num_uncollected_ > 0;
    });
    // Most sends are finished soon. One check for many saves switches between
    // threads.
    if (!draining_) changed_.wait_for(lock, kCollectEvery);
    for (auto& [dst, peer] : peers_) {
      while (collect_from(lock, dst, peer)) {
      }
    }
    if (stopping_) return;
  }
}

// Removes the oldest message to `dst` when it is finished.
bool CommunicatorLink::collect_from(std::unique_lock<std::mutex>& lock, int dst,
                                    Peer& peer) {
  if (stopping_ || peer.sends.empty()) return false;
  std::vector<comm::WorkPtr> works = peer.sends.front().works;
  const Clock::time_point posted = peer.sends.front().posted;
  lock.unlock();
  bool is_over = true;
  try {
    for (const comm::WorkPtr& work : works) {
      is_over = is_over && finished_within(*work, kSendSlice);
    }
  } catch (const std::exception& error) {
    report_lost(dst, error.what());
  }
  if (!is_over && owner_.faults->has_left(dst) &&
      Clock::now() - posted > kSendGrace) {
    is_over = true;  // no rank will take it any more
  }
  std::deque<Outgoing> finished;  // its tensors are freed without our lock
  lock.lock();
  if (!is_over) return false;
  finished.push_back(std::move(peer.sends.front()));
  peer.sends.pop_front();
  --num_uncollected_;
  lock.unlock();
  add_unsent(-1);
  finished.clear();
  works.clear();
  lock.lock();
  return true;
}

// --------------------------------------------------------------- receiving

void CommunicatorLink::receive_from(int peer) {
  begin_thread("smp-recv-" + std::to_string(peer));
  try {
    receive_messages(peer);
  } catch (const Closing&) {
  } catch (const wire::CorruptMessage& error) {
    report_corrupt(error.what());
  } catch (const std::exception& error) {
    report_lost(peer, error.what());
  }
}

void CommunicatorLink::receive_messages(int peer) {
  // There are two, so that the next message can come while one is handled.
  std::array<at::Tensor, 2> packets = {new_bytes(wire::kPacketBytes),
                                       new_bytes(wire::kPacketBytes)};
  comm::WorkPtr next = begin_receive(packets[0], peer, kPacketTag);
  for (uint64_t sequence = 0;; ++sequence) {
    end_receive(next);
    next = begin_receive(packets[(sequence + 1) % 2], peer, kPacketTag);
    owner_.deliver(read_message(peer, packets[sequence % 2], sequence));
  }
}

Message CommunicatorLink::read_message(int peer, const at::Tensor& packet,
                                       uint64_t sequence) {
  wire::Header header = wire::decode_packet(view_of(packet), peer);
  wire::check_sequence(header, sequence,
                       "the communicator '" + world_->name() + "'");
  int64_t num_bytes = wire::kPacketBytes;
  std::vector<at::Tensor> large;
  if (header.blob_is_inline) {
    large = wire::decode_blob(header.inline_blob, header, owner_.lanes);
  } else {
    const at::Tensor blob = new_bytes(header.blob_bytes);
    end_receive(begin_receive(blob, peer, kPayloadTag));
    num_bytes += header.blob_bytes;
    large = wire::decode_blob(view_of(blob), header, owner_.lanes);
  }
  std::vector<comm::WorkPtr> works;
  works.reserve(large.size());
  for (const at::Tensor& tensor : large) {
    works.push_back(begin_receive(tensor, peer, kPayloadTag));
  }
  for (const comm::WorkPtr& work : works) end_receive(work);
  count_received(num_bytes + header.large_bytes);
  return std::move(header.message);
}

comm::WorkPtr CommunicatorLink::begin_receive(const at::Tensor& to, int peer,
                                              int tag) {
  std::lock_guard lock(mutex_);
  if (stopping_) throw Closing{};
  comm::WorkPtr work = world_->recv(to, peer, tag);
  receives_.insert(work);
  return work;
}

void CommunicatorLink::end_receive(const comm::WorkPtr& work) {
  std::exception_ptr failure;
  try {
    work->wait(kForever);
  } catch (const std::exception&) {
    failure = std::current_exception();
  }
  std::lock_guard lock(mutex_);
  receives_.erase(work);
  if (failure && stopping_) throw Closing{};
  if (failure) std::rethrow_exception(failure);
}

// ------------------------------------------------------------------ the end

// Reports a broken connection. If the peer was killed, raised or left, the
// liveness channel reports so within milliseconds, with a better reason.
void CommunicatorLink::report_lost(int peer, const std::string& text) {
  const Clock::time_point deadline = Clock::now() + kReasonGrace;
  health::FaultBoard& faults = *owner_.faults;
  auto is_explained = [&] {
    return stopping_ || faults.fault().has_value() || faults.has_left(peer);
  };
  {
    std::unique_lock lock(mutex_);
    while (!is_explained() && Clock::now() < deadline) {
      changed_.wait_for(lock, milliseconds(20));
    }
    if (is_explained()) return;
  }
  faults.report(
      {.kind = health::Fault::Kind::kDied, .global_rank = peer, .text = text});
}

void CommunicatorLink::begin_close() {
  {
    std::lock_guard lock(mutex_);
    draining_ = true;
  }
  changed_.notify_all();
}

void CommunicatorLink::stop() {
  std::vector<comm::WorkPtr> in_flight;
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    in_flight.assign(receives_.begin(), receives_.end());
    for (const auto& [dst, peer] : peers_) {
      for (const Outgoing& outgoing : peer.sends) {
        in_flight.insert(in_flight.end(), outgoing.works.begin(),
                         outgoing.works.end());
      }
    }
  }
  changed_.notify_all();
  for (const comm::WorkPtr& work : in_flight) work->abort();
  for (std::thread& thread : threads_) thread.join();
  for (auto& [dst, peer] : peers_) peer.sends.clear();
  forget_unsent();
}

}  // namespace smp::mailbox
