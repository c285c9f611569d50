#include "csrc/comm/incoming_peers.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "csrc/common/check.h"

namespace smp::comm {
namespace {

constexpr int kTickMs = 250;

}  // namespace

IncomingPeers::IncomingPeers(const health::SocketEvents& events,
                             int global_rank, const std::string& address,
                             std::string secret, health::DoorLimits limits,
                             Owner owner)
    : events_(events),
      purpose_(peer_purpose(global_rank)),
      secret_(std::move(secret)),
      half_open_time_(limits.half_open_time),
      owner_(std::move(owner)),
      listener_(health::listen_tcp(address)),
      door_("the sockets of this rank", limits) {
  (void)health::Handshake::listener(secret_, purpose_);  // checks the secret
  events_.add(listener_.fd.get(), EPOLLIN,
              health::SocketEvents::Kind::kListener, 0);
}

int64_t IncomingPeers::num_ranks() const {
  std::lock_guard lock(mutex_);
  return std::count_if(sources_.begin(), sources_.end(),
                       [](const auto& entry) { return entry.second.has_come; });
}

// Watches the listener only while there is room. Further connections wait in
// the system and cause no events.
void IncomingPeers::watch_door() {
  const bool watches = door_.is_open();
  if (std::exchange(is_door_watched_, watches) == watches) return;
  events_.change(listener_.fd.get(), watches ? uint32_t{EPOLLIN} : 0,
                 health::SocketEvents::Kind::kListener, 0);
}

void IncomingPeers::accept_all() {
  while (health::OwnedFd fd = door_.accept(listener_.fd)) {
    const uint64_t id = next_id_++;
    const int number = fd.get();
    auto& connection = connections_[id];
    connection = std::make_unique<Connection>(
        std::move(fd), health::Handshake::listener(secret_, purpose_),
        owner_.find);
    try {
      events_.add(number, EPOLLIN, health::SocketEvents::Kind::kIncoming, id);
    } catch (const Error& error) {
      end(id, error.what());
    }
  }
  watch_door();
}

void IncomingPeers::serve(uint64_t id) {
  const auto entry = connections_.find(id);
  if (entry == connections_.end()) return;
  Connection& connection = *entry->second;
  std::string why;
  bool goes_on = false;
  try {
    goes_on = connection.socket.read(why, [&] { admit(connection); });
  } catch (const std::exception& error) {
    why = error.what();
    if (!connection.is_rank) door_.log_refusal(connection.socket.fd(), why);
  }
  if (!goes_on) end(id, why);
  watch_door();
}

// Called as the handshake advances, before any later bytes are read.
void IncomingPeers::admit(Connection& connection) {
  if (connection.is_rank) return;
  if (connection.claimed < 0) claim(connection);
  if (!connection.socket.is_proven()) return;
  {
    std::lock_guard lock(mutex_);
    Source& source = sources_[connection.claimed];
    SMP_CHECK(!source.has_come, "global_rank ", connection.claimed,
              " has connected a second time");
    source.has_come = true;
    source.lost_why.clear();  // its own connection will say when it is over
  }
  connection.is_rank = true;
  door_.on_no_longer_half_open();
  withdraw_claim(connection);
}

void IncomingPeers::claim(Connection& connection) {
  const int rank = connection.socket.handshake().caller_number();
  if (rank < 0) return;
  std::lock_guard lock(mutex_);
  connection.claimed = rank;
  ++sources_[rank].num_claims;
}

void IncomingPeers::withdraw_claim(Connection& connection) {
  std::string why;
  {
    std::lock_guard lock(mutex_);
    Source& source = sources_[connection.claimed];
    if (--source.num_claims == 0) why = std::exchange(source.lost_why, "");
    if (!source.has_come && source.num_claims == 0) {
      sources_.erase(connection.claimed);
    }
  }
  if (!why.empty()) owner_.lost(connection.claimed, why);
}

void IncomingPeers::end(uint64_t id, const std::string& why) {
  const auto entry = connections_.find(id);
  const std::unique_ptr<Connection> ended = std::move(entry->second);
  connections_.erase(entry);
  if (ended->is_rank) return owner_.lost(ended->claimed, why);
  door_.on_no_longer_half_open();
  if (ended->claimed >= 0) withdraw_claim(*ended);
}

int IncomingPeers::tick_ms() const {
  return door_.num_half_open() > 0 || !is_door_watched_ ? kTickMs : -1;
}

void IncomingPeers::tick() {
  std::vector<uint64_t> late;
  for (const auto& [id, connection] : connections_) {
    if (!connection->is_rank && door_.is_late(connection->since)) {
      late.push_back(id);
    }
  }
  for (const uint64_t id : late) {
    door_.log_refusal(connections_[id]->socket.fd(), health::kTooLate);
    end(id, health::kTooLate);
  }
  tell_of_overdue();
  door_.retry_accept();
  watch_door();
}

// Reports losses that are overdue. Processes that claim to be the rank, one
// after the other, must not hide its loss.
void IncomingPeers::tell_of_overdue() {
  std::map<int, std::string> overdue;
  {
    std::lock_guard lock(mutex_);
    const auto now = std::chrono::steady_clock::now();
    for (auto& [rank, source] : sources_) {
      if (!source.lost_why.empty() && now - source.lost_at > half_open_time_) {
        overdue[rank] = std::exchange(source.lost_why, "");
      }
    }
  }
  for (const auto& [rank, why] : overdue) owner_.lost(rank, why);
}

bool IncomingPeers::will_tell(int global_rank, const std::string& why) {
  std::lock_guard lock(mutex_);
  const auto entry = sources_.find(global_rank);
  if (entry == sources_.end()) return false;
  Source& source = entry->second;
  if (!source.has_come && source.lost_why.empty()) {
    source.lost_why = why;
    source.lost_at = std::chrono::steady_clock::now();
  }
  return true;
}

}  // namespace smp::comm
