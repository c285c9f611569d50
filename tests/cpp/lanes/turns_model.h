#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "csrc/lanes/copy_turns.h"

namespace smp::lanes {

/// Behaviour of the model's hosts, also where it differs from the library's.
struct TurnsRule {
  /// A sender's receipt leaves when the channel may have its next copy.
  bool receipt_follows_end = false;
  /// Turns begin at once.
  bool turns_overlap = false;
};

/// The threads of two to four ranks that have a lane with turns, over the
/// library's CopyTurns and without another line of it. Each rank posts messages
/// in a program. Handlers forward tensors that have come, which blocks their
/// threads until the copies are over; among these are threads that bring
/// receipts. A device does one piece of work at a time, in the order in which
/// its host has enqueued it. Threads and devices take their steps in a random
/// order and at random speeds, until none can.
class TurnsModel {
 public:
  TurnsModel(uint64_t seed, TurnsRule rule);

  /// @return whether all ends. False: something waits for itself
  bool run();

  int num_copies() const { return static_cast<int>(copies_.size()); }

 private:
  using Pair = std::pair<int, int>;  // of ranks: from, to

  struct Message {
    Pair pair;
    int num_tensors = 0;
    bool is_of_program = false;
    int data = -1;     // message whose tensors it forwards
    int trigger = -1;  // message whose handler posts it, if not that of `data`
    std::vector<int> copies;  // with turns
    int host_work = -1;       // copy through the host
    bool has_asked = false;
    std::shared_ptr<bool> may_leave = std::make_shared<bool>(false);
    bool is_pushed = false;  // by a handler
    bool is_posted = false;
    bool is_handled = false;
  };
  // Work of a device, or of two.
  struct Copy {
    Pair pair;
    int channel = 0;
    int num_missing = 2;  // parts that are not enqueued
    bool is_over = false;
    bool has_end = false;  // for the sender's host
  };
  // A step of the thread that sends.
  enum class Part { kEnqueue, kReceipt, kEnd, kTurn };
  struct Letter {
    int message = -1;
    int receipt_of = -1;  // copy
  };
  enum class Stage { kIdle, kTakes, kWantsInbox, kHandles };
  // A thread that may handle messages.
  struct Thread {
    int rank = 0;
    int message = -1;
    Stage stage = Stage::kIdle;
    size_t num_taken = 0;
    // The turn of the next tensor; null: not asked for.
    std::shared_ptr<bool> turn = {};
    std::deque<int> pushes = {};
  };
  struct Actor {
    std::function<bool()> step;  // returns whether it has moved
    uint64_t slowness = 1;
  };

  int pick(int size) {
    return static_cast<int>(random_() % static_cast<uint64_t>(size));
  }
  int pick_arrival(int rank, bool needs_tensors);
  void make_messages();
  void make_actors();
  void add_actor(std::function<bool()> step);

  bool are_over(int message) const;
  void post(int message);
  int find_channel(Pair pair) const;
  int new_copy(Pair pair, int num_parts);
  void enqueue(int rank, int copy);
  bool run_program(int rank);
  void ask_for_turn(int message);
  bool let_message_leave(Pair pair);
  bool receive(Pair pair);
  void take_receipt(int rank, int from, int copy);
  bool send(int rank);
  void do_part(int rank, int copy, Part part);
  bool take(int rank);
  bool take_next(Thread& thread);
  void take_tensor(Thread& thread);
  bool begin_take(Thread& thread);
  bool handle(Thread& thread);
  void begin_handling(Thread& thread);
  void end_handling(Thread& thread);
  bool end_copy(int rank);
  bool step(bool may_be_late);

  const TurnsRule rule_;
  std::mt19937_64 random_;
  int num_ranks_ = 0;
  std::vector<Message> messages_;
  std::vector<Copy> copies_;
  std::vector<Actor> actors_;
  std::vector<std::unique_ptr<CopyTurns>> turns_;  // by rank
  std::vector<std::deque<int>> programs_;          // messages
  std::vector<std::deque<int>> devices_;           // copies
  std::vector<std::deque<int>> ready_;             // copies to send
  std::vector<size_t> num_parts_done_;             // of the first of these
  std::map<std::pair<Pair, int>, int> taken_;      // last copy of a channel
  std::vector<bool> is_inbox_locked_;
  std::vector<Thread> takers_;               // by rank
  std::map<Pair, Thread> receivers_;         // by link
  std::map<Pair, std::deque<int>> leaving_;  // messages
  std::map<Pair, std::deque<Letter>> links_;
  std::map<Pair, std::deque<int>> held_;  // messages
};

}  // namespace smp::lanes
