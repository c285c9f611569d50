#include "csrc/health/hub_connections.h"

#include <utility>

#include "csrc/common/check.h"

namespace smp::health {
namespace {

using std::chrono::milliseconds;
using Kind = SocketEvents::Kind;
using Type = LivenessFrame::Type;

constexpr size_t kMaxHelloBytes = 4096;
constexpr size_t kServedAtOnce = SocketEvents::kMaxEvents;

DoorLimits with_room(DoorLimits limits, int world_size) {
  limits.max_half_open += static_cast<size_t>(world_size);
  return limits;
}

}  // namespace

HubConnections::HubConnections(int world_size, const std::string& address,
                               std::string secret, DoorLimits limits,
                               Owner owner)
    : secret_(std::move(secret)),
      owner_(std::move(owner)),
      listener_(listen_tcp(address)),
      door_("the liveness hub", with_room(limits, world_size)),
      of_rank_(static_cast<size_t>(world_size), -1) {
  (void)Handshake::listener(secret_, kHubPurpose);  // checks the secret
  events_.add(listener_.fd.get(), EPOLLIN, Kind::kListener, 0);
  events_.add(wake_.get(), EPOLLIN, Kind::kWake, 0);
}

// ------------------------------------------------------------------ receiving

void HubConnections::serve(milliseconds timeout) {
  const auto serve_one = [this](Kind kind, uint64_t id, uint32_t what) {
    serve(kind, id, what);
  };
  // Takes all frames that have come before any end of a connection counts. The
  // rank that failed first may have sent its reason, and ranks that ended
  // because of it are no reason. Serves each connection once, so that a busy
  // rank does not keep others from an answer.
  bool has_more = events_.wait(static_cast<int>(timeout.count()), serve_one);
  for (size_t i = 0; has_more && i < connections_.size(); i += kServedAtOnce) {
    has_more = events_.wait(0, serve_one);
  }
  drop_closed();
  watch_door();
}

void HubConnections::tick() {
  close_late();
  drop_closed();
  door_.retry_accept();
  watch_door();
}

void HubConnections::serve(Kind kind, uint64_t id, uint32_t what) {
  if (kind == Kind::kWake) return wake_.clear();
  if (kind == Kind::kListener) return accept_all();
  const auto entry = connections_.find(id);
  if (entry == connections_.end()) return;
  Connection& connection = *entry->second;
  if ((what & EPOLLOUT) != 0 && connection.waits_for_room) {
    write(id, connection);
  }
  if ((what & ~uint32_t{EPOLLOUT}) != 0) receive(id, connection);
}

// Watches the listener only while there is room. Further connections wait in
// the system and cause no events.
void HubConnections::watch_door() {
  const bool watches = door_.is_open();
  if (std::exchange(is_door_watched_, watches) == watches) return;
  events_.change(listener_.fd.get(), watches ? uint32_t{EPOLLIN} : 0,
                 Kind::kListener, 0);
}

void HubConnections::accept_all() {
  while (OwnedFd fd = door_.accept(listener_.fd)) {
    const uint64_t id = next_id_++;
    try {
      events_.add(fd.get(), EPOLLIN, Kind::kIncoming, id);
    } catch (const Error& error) {
      door_.log_refusal(fd, error.what());
      door_.on_no_longer_half_open();
      continue;
    }
    connections_[id] = std::make_unique<Connection>(
        std::move(fd), Handshake::listener(secret_, kHubPurpose));
    half_open_.insert(id);
  }
  watch_door();
}

void HubConnections::receive(uint64_t id, Connection& connection) {
  if (connection.is_closed) return;
  const bool is_stranger = connection.global_rank < 0;
  const size_t most = is_stranger ? kMaxHelloBytes : SIZE_MAX;
  const IoResult result = read_available(connection.fd, connection.in, most);
  connection.is_unreachable |= result == IoResult::kUnreachable;
  try {
    read(id, connection);
  } catch (const Error& error) {  // not one of us, or confused
    if (is_stranger) door_.log_refusal(connection.fd, error.what());
    return note_closed(id, connection);
  }
  if (result != IoResult::kOk) note_closed(id, connection);
}

void HubConnections::read(uint64_t id, Connection& connection) {
  std::string& in = connection.in;
  if (!connection.handshake.is_proven()) {
    std::string answer;
    in.erase(0, connection.handshake.advance(in, answer));
    queue(id, connection, answer);
    if (!connection.handshake.is_proven()) return;
  }
  while (auto frame = take_frame(in)) {
    connection.heard_at = Clock::now();
    if (connection.global_rank < 0) {
      take_hello(id, connection, *frame);
    } else {
      owner_.take(connection.global_rank, std::move(*frame));
    }
  }
  SMP_CHECK(connection.global_rank >= 0 || in.size() < kMaxHelloBytes,
            "its hello is too long");
}

void HubConnections::take_hello(uint64_t id, Connection& connection,
                                const LivenessFrame& hello) {
  SMP_CHECK(hello.type == Type::kHello, "expected a hello");
  const int rank = hello.global_rank;
  SMP_CHECK(rank == connection.handshake.caller_number(),
            "it says global_rank ", rank, " and has proven ",
            connection.handshake.caller_number());
  LivenessFrame answer;
  answer.text = owner_.refusal(rank);
  answer.type = answer.text.empty() ? Type::kWelcome : Type::kRefused;
  queue(id, connection, encode_frame(answer));
  if (answer.type == Type::kRefused) return;
  connection.global_rank = rank;
  of_rank_[static_cast<size_t>(rank)] = static_cast<int64_t>(id);
  half_open_.erase(id);
  door_.on_no_longer_half_open();
  owner_.come(rank, hello);
}

// -------------------------------------------------------------------- sending

void HubConnections::send(int global_rank, const std::string& bytes) {
  const int64_t id = of_rank_[static_cast<size_t>(global_rank)];
  if (id < 0) return;
  const auto number = static_cast<uint64_t>(id);
  queue(number, *connections_.at(number), bytes);
}

void HubConnections::send_to_all(const std::string& bytes, int except) {
  for (int rank = 0; rank < static_cast<int>(of_rank_.size()); ++rank) {
    if (rank != except) send(rank, bytes);
  }
}

void HubConnections::send_to_listening(const std::string& bytes) {
  const Clock::time_point now = Clock::now();
  for (const int64_t id : of_rank_) {
    if (id < 0) continue;
    const auto number = static_cast<uint64_t>(id);
    Connection& connection = *connections_.at(number);
    const bool is_quiet = now - connection.heard_at > kQuietAfter;
    if (is_quiet && now - connection.alive_sent_at < kQuietEvery) continue;
    connection.alive_sent_at = now;
    queue(number, connection, bytes);
  }
}

void HubConnections::queue(uint64_t id, Connection& connection,
                           const std::string& bytes) {
  if (bytes.empty() || connection.is_closed) return;
  connection.out += bytes;
  if (connection.waits_for_room || std::exchange(connection.is_queued, true)) {
    return;
  }
  queued_.push_back(id);
}

void HubConnections::flush() {
  for (const uint64_t id : std::exchange(queued_, {})) {
    const auto entry = connections_.find(id);
    if (entry == connections_.end()) continue;
    entry->second->is_queued = false;
    write(id, *entry->second);
  }
}

void HubConnections::write(uint64_t id, Connection& connection) {
  const IoResult result = write_available(connection.fd, connection.out);
  if (result != IoResult::kOk) {
    connection.out.clear();  // reading may find a last word, and the end
    connection.is_unreachable |= result == IoResult::kUnreachable;
  }
  const bool waits = !connection.out.empty();
  if (std::exchange(connection.waits_for_room, waits) == waits) return;
  num_waiting_ = waits ? num_waiting_ + 1 : num_waiting_ - 1;
  events_.change(connection.fd.get(), waits ? EPOLLIN | EPOLLOUT : EPOLLIN,
                 Kind::kIncoming, id);
}

// -------------------------------------------------------------------- the end

void HubConnections::note_closed(uint64_t id, Connection& connection) {
  if (std::exchange(connection.is_closed, true)) return;
  closed_.push_back(id);
}

// Closes connections that have been half-open for too long, oldest first.
void HubConnections::close_late() {
  for (const uint64_t id : half_open_) {
    Connection& connection = *connections_.at(id);
    if (connection.is_closed) continue;
    if (!door_.is_late(connection.accepted)) return;
    door_.log_refusal(connection.fd, kTooLate);
    note_closed(id, connection);
  }
}

void HubConnections::drop_closed() {
  for (const uint64_t id : std::exchange(closed_, {})) {
    const std::unique_ptr<Connection> ended = std::move(connections_.at(id));
    connections_.erase(id);
    events_.remove(ended->fd.get());
    if (ended->waits_for_room) --num_waiting_;
    const int rank = ended->global_rank;
    if (rank < 0) {
      half_open_.erase(id);
      door_.on_no_longer_half_open();
    } else {
      of_rank_[static_cast<size_t>(rank)] = -1;
      owner_.lost(rank, ended->is_unreachable);
    }
  }
}

void HubConnections::close() {
  connections_.clear();
  of_rank_.assign(of_rank_.size(), -1);
  half_open_.clear();
  queued_.clear();
  closed_.clear();
  num_waiting_ = 0;
}

}  // namespace smp::health
