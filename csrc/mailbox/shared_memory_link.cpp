#include "csrc/mailbox/shared_memory_link.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <exception>
#include <span>
#include <utility>

#include "csrc/common/check.h"

namespace smp::mailbox {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using Seat = shm::Doorbell::Seat;

// Bytes of a long message after which the reader sees them, so that both sides
// copy at the same time.
constexpr size_t kPublishBytes = 64 << 10;
// Bytes of one peer before the next one has its turn.
constexpr int64_t kTurnBytes = 256 << 10;
// Time after which messages to a rank that has left are given up.
constexpr milliseconds kRingGrace{2000};
// Time before a helper sleeps: a few hops, so that a chain of short calls
// between two ranks keeps both awake.
constexpr microseconds kLookFor{150};
// Time between the sending thread's checks for that, while a message is unsent.
constexpr milliseconds kPeerLookEvery{200};

// Lets a second thread of the core go first, if it has one.
void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

at::Tensor copy_of(const uint8_t* from, size_t size) {
  at::Tensor copy =
      at::empty({static_cast<int64_t>(size)}, at::TensorOptions(at::kByte));
  std::copy_n(from, size, copy.mutable_data_ptr<uint8_t>());
  return copy;
}

const uint8_t* begin_of(const at::Tensor& tensor) {
  return static_cast<const uint8_t*>(tensor.const_data_ptr());
}

// Returns the thread-local state of a new thread.
std::shared_ptr<const at::ThreadLocalState> make_plain_state() {
  std::shared_ptr<const at::ThreadLocalState> state;
  std::thread([&] { state = std::make_shared<at::ThreadLocalState>(); }).join();
  return state;
}

}  // namespace

SharedMemoryLink::Peer::Peer(shm::SharedMemory::Peer ends,
                             lanes::LaneTable* lanes)
    : global_rank(ends.global_rank),
      to(ends.to),
      from(ends.from),
      incoming(ends.global_rank, lanes) {}

SharedMemoryLink::SharedMemoryLink(shm::SharedMemoryPtr memory, LinkOwner owner)
    : Link(std::move(owner)),
      memory_(std::move(memory)),
      plain_state_(make_plain_state()) {
  for (const shm::SharedMemory::Peer& ends : memory_->take_peers()) {
    peers_.push_back(std::make_unique<Peer>(ends, owner_.lanes));
    peer_of_[ends.global_rank] = peers_.back().get();
  }
  fault_subscription_ =
      owner_.faults->subscribe([this] { memory_->send_bell().ring(); });
  receiver_ = std::thread([this] { receive_all(); });
  sender_ = std::thread([this] { send_backlogs(); });
}

// ----------------------------------------------------------------- sending

void SharedMemoryLink::post(int dst, Message message) {
  wire::Parts parts = wire::take_apart(message);
  Peer& peer = *peer_of_.at(dst);
  {
    std::lock_guard lock(peer.mutex);
    wire::set_sequence(parts.header.data(), peer.next_sequence++);
    peer.scratch.resize(parts.header.size() +
                        static_cast<size_t>(parts.blob_bytes));
    std::copy(parts.header.begin(), parts.header.end(), peer.scratch.begin());
    wire::write_blob(message, parts, peer.scratch.data() + parts.header.size());
    write_or_keep(peer, parts);
  }
  count_sent(parts.num_bytes());
}

// Makes written bytes visible to the peer.
void SharedMemoryLink::publish(Peer& peer) {
  if (owner_.pause) owner_.pause(PausePlace::kPublish);
  peer.to.publish();
}

// Writes until all is written or the ring is full.
size_t SharedMemoryLink::write_pieces(Peer& peer, const uint8_t* from,
                                      size_t size) {
  size_t done = 0;
  while (done < size) {
    const size_t wanted = std::min(size - done, kPublishBytes);
    const size_t written = peer.to.write(from + done, wanted);
    if (written == 0) break;
    done += written;
    if (done < size) publish(peer);
  }
  return done;
}

// Writes a message, or keeps what does not fit. Called with the lock of the
// peer, and with header and blob in its scratch.
void SharedMemoryLink::write_or_keep(Peer& peer, const wire::Parts& parts) {
  Outgoing kept{{}, Clock::now()};
  bool fits = peer.backlog.empty();
  auto put = [&](const uint8_t* begin, size_t size, const at::Tensor& owner) {
    const size_t done = fits ? write_pieces(peer, begin, size) : 0;
    if (done == size) return;
    fits = false;
    const at::Tensor keeper =
        owner.defined() ? owner : copy_of(begin + done, size - done);
    const uint8_t* rest = owner.defined() ? begin + done : begin_of(keeper);
    kept.pieces.push_back({keeper, rest, size - done});
  };
  const bool was_writer = fits;
  put(peer.scratch.data(), peer.scratch.size(), {});
  for (const wire::Parts::Large& one : parts.large) {
    put(begin_of(one.data), one.data.nbytes(),
        one.is_callers ? at::Tensor() : one.data);
  }
  if (was_writer) publish(peer);
  if (fits) return;
  peer.backlog.push_back(std::move(kept));
  add_unsent(1);
  memory_->send_bell().ring();
}

// Returns the message that the sending thread works on. Only that thread ends
// it, so it stays in place without the lock.
SharedMemoryLink::Outgoing* SharedMemoryLink::first_unsent(Peer& peer) {
  std::lock_guard lock(peer.mutex);
  return peer.backlog.empty() ? nullptr : &peer.backlog.front();
}

// Writes up to one turn's bytes. Returns whether anything has changed.
bool SharedMemoryLink::send_some(Peer& peer, Outgoing& outgoing) {
  if (is_given_up(peer, outgoing)) {
    end_first(peer);
    return true;
  }
  size_t budget = kTurnBytes;
  while (!outgoing.pieces.empty() && budget > 0) {
    Piece& piece = outgoing.pieces.front();
    const size_t wanted = std::min(piece.size, budget);
    const size_t written = write_pieces(peer, piece.begin, wanted);
    piece.begin += written;
    piece.size -= written;
    budget -= written;
    if (piece.size == 0) outgoing.pieces.pop_front();
    if (written < wanted) break;
  }
  if (budget < kTurnBytes) publish(peer);
  if (!outgoing.pieces.empty()) return budget < kTurnBytes;
  end_first(peer);
  return true;
}

// Returns whether the message will not be taken any more.
bool SharedMemoryLink::is_given_up(const Peer& peer,
                                   const Outgoing& outgoing) const {
  const auto fault = owner_.faults->fault();
  if (fault && fault->kind == health::Fault::Kind::kDied &&
      fault->global_rank == peer.global_rank) {
    return true;
  }
  return owner_.faults->has_left(peer.global_rank) &&
         Clock::now() - outgoing.posted > kRingGrace;
}

void SharedMemoryLink::end_first(Peer& peer) {
  std::deque<Outgoing> ended;  // its memory is freed without the lock
  {
    std::lock_guard lock(peer.mutex);
    ended.push_back(std::move(peer.backlog.front()));
    peer.backlog.pop_front();
  }
  add_unsent(-1);
}

void SharedMemoryLink::send_backlogs() {
  begin_thread("smp-send-shm");
  shm::Doorbell& bell = memory_->send_bell();
  while (!stopping_) {
    if (send_round()) continue;
    const uint32_t seen = bell.prepare();
    if (stopping_ || must_send()) {
      bell.cancel();
      continue;
    }
    std::optional<milliseconds> timeout;
    if (num_unsent() > 0) timeout = kPeerLookEvery;
    bell.sleep(Seat::kFirst, seen, timeout);
    bell.cancel();
  }
}

// Gives each peer one turn. Returns whether anything has changed.
bool SharedMemoryLink::send_round() {
  bool has_moved = false;
  for (const auto& peer : peers_) {
    Outgoing* const outgoing = first_unsent(*peer);
    if (outgoing == nullptr) continue;
    try {
      has_moved |= send_some(*peer, *outgoing);
    } catch (const std::exception& error) {
      report_corrupt(error.what());
      end_first(*peer);
    }
  }
  return has_moved;
}

bool SharedMemoryLink::must_send() {
  bool result = false;
  for (const auto& peer : peers_) {
    if (first_unsent(*peer) != nullptr) result |= !peer->to.must_wait();
  }
  return result;
}

// --------------------------------------------------------------- receiving

// Sleeps in the first seat. While a helper has the role that seat is not
// registered, and the helper registers it when it leaves.
void SharedMemoryLink::receive_all() {
  begin_thread("smp-recv-shm");
  shm::Doorbell& bell = memory_->receive_bell();
  while (!stopping_) {
    if (take_role(Role::kReceiver)) {
      while (!stopping_ && receive_next()) {
      }
    }
    uint32_t seen = 0;
    {
      std::lock_guard lock(role_mutex_);
      if (role_ == Role::kReceiver) role_ = Role::kNobody;
      if (role_ == Role::kHelper) {
        seen = bell.watch(Seat::kFirst);
      } else {
        seen = bell.prepare(Seat::kFirst);
        if (has_arrivals()) continue;
      }
    }
    if (!stopping_) bell.sleep(Seat::kFirst, seen);
  }
}

// Takes the role if it is free, and returns whether it was.
bool SharedMemoryLink::take_role(Role role) {
  std::lock_guard lock(role_mutex_);
  if (stopping_ || role_ != Role::kNobody) return false;
  role_ = role;
  memory_->receive_bell().cancel();
  return true;
}

bool SharedMemoryLink::help_until(const std::function<bool()>& done,
                                  const std::function<bool()>& is_alone) {
  if (!take_role(Role::kHelper)) return false;
  {
    // The waiting thread may be in any mode, which handlers must not see.
    const at::ThreadLocalStateGuard guard(*plain_state_);
    help(done, is_alone);
  }
  shm::Doorbell& bell = memory_->receive_bell();
  bool has_more = false;
  {
    std::lock_guard lock(role_mutex_);
    role_ = Role::kNobody;
    bell.prepare(Seat::kFirst);  // the receiving thread sleeps there
    has_more = stopping_ || has_arrivals();
  }
  if (has_more) bell.ring();
  helper_left_.notify_all();
  return true;
}

void SharedMemoryLink::help(const std::function<bool()>& done,
                            const std::function<bool()>& is_alone) {
  shm::Doorbell& bell = memory_->receive_bell();
  while (!stopping_ && !done()) {
    if (receive_next() || (is_alone() && look_for_a_while())) continue;
    const uint32_t seen = bell.prepare(Seat::kSecond);
    if (!stopping_ && !done() && !has_arrivals()) {
      bell.sleep(Seat::kSecond, seen);
    }
    bell.cancel();
  }
}

// Spins for a message, and returns whether one has come. In a chain of short
// calls the next message comes sooner than a thread could sleep and be woken.
bool SharedMemoryLink::look_for_a_while() {
  const auto end = Clock::now() + kLookFor;
  const uint32_t num_calls = num_helper_calls_.load();
  do {
    for (int i = 0; i < 16; ++i) {
      if (has_arrivals()) return true;
      pause_core();
    }
  } while (Clock::now() < end && num_helper_calls_.load() == num_calls &&
           !stopping_);
  return false;
}

void SharedMemoryLink::wake_helper() {
  num_helper_calls_.fetch_add(1);
  memory_->receive_bell().ring();
}

// Gives a turn to the next peer from which bytes have come, if any.
bool SharedMemoryLink::receive_next() {
  for (size_t i = 0; i < peers_.size(); ++i) {
    Peer& peer = *peers_[next_peer_];
    next_peer_ = (next_peer_ + 1) % peers_.size();
    if (peer.is_broken) continue;
    try {
      if (receive_some(peer)) return true;
    } catch (const std::exception& error) {
      peer.is_broken = true;
      report_corrupt(error.what());
    }
  }
  return false;
}

bool SharedMemoryLink::receive_some(Peer& peer) {
  if (!peer.from.has_more()) return false;
  int64_t budget = kTurnBytes;
  if (!peer.incoming.read_from(peer.from, budget)) return true;
  count_received(peer.incoming.num_bytes());
  owner_.deliver(peer.incoming.take());
  return true;
}

bool SharedMemoryLink::has_arrivals() {
  return std::any_of(peers_.begin(), peers_.end(), [](const auto& peer) {
    return !peer->is_broken && peer->from.has_more();
  });
}

// ------------------------------------------------------------------ the end

void SharedMemoryLink::stop() {
  owner_.faults->unsubscribe(fault_subscription_);
  stopping_ = true;
  memory_->receive_bell().ring();
  memory_->send_bell().ring();
  receiver_.join();
  sender_.join();
  std::unique_lock lock(role_mutex_);
  helper_left_.wait(lock, [this] { return role_ == Role::kNobody; });
  for (const auto& peer : peers_) peer->backlog.clear();
  forget_unsent();
}

}  // namespace smp::mailbox
