#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "csrc/health/fault_aware_wait.h"
#include "csrc/health/fault_board.h"
#include "csrc/mailbox/mailbox.h"

namespace smp::mailbox {

/// An object on its way: bytes (a pickle), and tensors on the CPU to which
/// these refer, and whose memory is not copied.
struct Object {
  std::string bytes;
  std::vector<at::Tensor> tensors = {};
};

/// Exchanges objects and byte strings between ranks, over the mailbox.
/// All calls block. They end with an error at the time-out, on a fault, when a
/// rank they need has left, and on Ctrl-C (see
/// FaultBoard::set_interrupt_check). Thread-safe.
///
/// Objects of one sender are received in the order they were sent, whether by
/// `send` or `broadcast`. Collectives are matched by the set of ranks and
/// counted per set, so that other traffic never mixes with them. In large sets
/// a rank sends to log2(n) others only, which relay the parts.
class ObjectExchange {
 public:
  static constexpr std::chrono::minutes kDefaultTimeout{30};

  /// Takes over Channel::kObject of the mailbox.
  ObjectExchange(std::shared_ptr<Mailbox> mailbox,
                 std::shared_ptr<health::FaultBoard> faults,
                 std::chrono::milliseconds timeout = kDefaultTimeout);
  ~ObjectExchange();
  ObjectExchange(const ObjectExchange&) = delete;
  ObjectExchange& operator=(const ObjectExchange&) = delete;

  void set_timeout(std::chrono::milliseconds timeout);

  /// Returns when `dst` has called `recv`; at once for this rank itself.
  /// @param object  nothing writes to its tensors before the return
  void send(int dst, Object object);

  /// Returns the next object that `src` has sent or broadcast to this rank.
  Object recv(int src);

  /// Sends an object to `ranks`; called by the sender only, which they may
  /// contain. Returns when all others have called `recv`.
  void broadcast(const std::vector<int>& ranks, Object object);

  /// Gathers byte strings. Collective over `ranks`, which must contain this
  /// rank.
  /// @param what  words for errors, for instance "smp.allgather(WORLD)"
  /// @return the bytes of all, in the order of `ranks`
  std::vector<std::string> all_gather(const std::vector<int>& ranks,
                                      std::string bytes,
                                      const std::string& what = "all_gather");

  /// Returns when all of `ranks` have called it. Collective.
  void barrier(const std::vector<int>& ranks,
               const std::string& what = "barrier");

 private:
  // Key of the n-th collective over a set of ranks: hash of the set, and n.
  using GatherKey = std::pair<int64_t, int64_t>;
  struct Part {
    int64_t kind;
    Message message;
  };
  using Parts = std::map<int, Part>;  // by source rank

  void on_message(Message&& message);
  void relay(const Message& part, const std::vector<int>& ranks);
  void post_object(const std::vector<int>& ranks, Object object,
                   const std::string& what);
  std::vector<std::string> gather(const std::vector<int>& ranks,
                                  std::string bytes, int64_t kind,
                                  const std::string& what);
  void check_parts(const Parts& parts, int64_t kind,
                   const std::string& what) const;
  void check_rank(int global_rank, const char* what) const;
  health::WaitSpec spec(std::string what, std::string hint);

  const std::shared_ptr<Mailbox> mailbox_;
  const std::shared_ptr<health::FaultBoard> faults_;
  const int self_;
  int subscription_ = -1;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::chrono::milliseconds timeout_;
  int64_t next_object_id_ = 0;
  std::map<int64_t, std::set<int>> unacknowledged_;  // by object id
  std::map<int, std::deque<Message>> objects_;       // by source rank
  std::map<int64_t, int64_t> next_gather_;           // by hash of the ranks
  std::map<GatherKey, Parts> gathers_;
};

}  // namespace smp::mailbox
