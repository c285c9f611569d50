#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <random>
#include <utility>
#include <vector>

namespace smp::lanes {

/// Behaviour of the model's ranks, also where it differs from the library's.
struct OrderRule {
  /// A copy of the receiver and that of the sender end together, as with NCCL;
  /// else the receiver's comes after, as out of memory that both can see.
  bool has_rendezvous = false;
  /// Sends and receives of a rank share one stream.
  bool one_stream_for_both_ways = false;
  /// Copies that meet begin, on each device, in the order in which its host has
  /// asked for them, as NCCL_LAUNCH_ORDER_IMPLICIT wants it.
  bool has_launch_order = false;
  /// A slot is free when its last copy is over; else when the receiver has
  /// asked for its part.
  bool waits_for_last_copy = false;
  /// There is always a free slot.
  bool has_endless_slots = false;
  /// A message leaves when its task is chosen; devices are asked for it later.
  bool header_before_producer = false;
  /// Hardware queues of each device, where stream i uses queue i modulo this
  /// number, and the head of a queue blocks all work behind it; 0: each stream
  /// has its own.
  int num_queues = 0;
  /// A head blocks its queue until it is over, since CUDA does not promise that
  /// two streams progress independently; else until it has begun.
  bool head_blocks_until_over = false;
  /// A send is asked for when its producer is over.
  bool send_follows_producer = false;
  /// A message leaves when its send has been asked for.
  bool header_follows_send = false;
  /// A send is asked for when the receiver has asked, and copies have turns
  /// (csrc/lanes/copy_turns.h).
  bool has_turns = false;
  /// Copies of one pair do not block each other, as if they shared a kernel.
  bool joins_copies_of_pair = false;
};

/// Ranks whose hosts run ahead of their devices, without a line of the library:
/// the rule of docs/design/device_lanes.md and nothing else. The tasks of a
/// random graph lie on random ranks. A host asks its device for a task when the
/// messages of all its inputs have come. Results travel over lanes of one slot,
/// and through the host, which waits for their copy before the message leaves,
/// while the slot is in use. Streams do what they were asked for in order, and
/// several of them may share a hardware queue. Hosts and devices take their
/// steps in a random order, until none can.
class OrderModel {
 public:
  OrderModel(uint64_t seed, OrderRule rule);

  /// @return whether all ends. False: something waits for itself
  bool run();

  int num_over_lanes() const { return num_over_lanes_; }
  int num_through_hosts() const { return num_through_hosts_; }

 private:
  // Work that a device is asked for.
  struct Work {
    bool is_asked = false;
    bool has_begun = false;
    bool is_done = false;
    int ahead = -1;         // in its hardware queue
    bool has_turn = false;  // a send whose turn it is
    // State of copies that meet.
    bool needs_partner = false;
    int partner = -1;
    int peer = -1;      // rank
    int producer = -1;  // work
    int begins_after = -1;
    std::vector<int> waits_for;
  };
  struct Task {
    int rank = 0;
    int num_missing = 0;          // inputs whose messages have not come
    std::vector<int> consumers;   // ranks, each once, not its own
    std::vector<int> successors;  // tasks
    std::map<int, int> arrived;   // work that brings it, by rank
    std::vector<int> inputs;
    bool is_chosen = false;
  };
  struct Message {
    int task = -1;  // -1: the slot is free again
    int copy = -1;  // the sender's work
    bool is_on_lane = false;
  };
  // The copies with a higher rank that have their turn.
  struct Turns {
    int peer = -1;
    bool are_sends = false;
    int num = 0;
  };
  using Pair = std::pair<int, int>;  // of ranks: from, to

  int pick(int size) {
    return static_cast<int>(random_() % static_cast<uint64_t>(size));
  }
  void make_graph();
  int new_work();
  void ask(int work, Pair stream, std::vector<int> waits_for);
  Pair send_stream(Pair pair) const;
  Pair receive_stream(Pair pair) const;

  bool choose_task();
  bool ask_for_late_task();
  void ask_for(int task, int work);
  void post_results(int task, int work);
  bool let_message_leave();
  bool take_message();
  void take(Pair pair, const Message& message);
  void post_send(Pair pair, int copy);
  void ask_for_send(Pair pair, int copy);
  bool ask_for_late_send();
  bool may_begin_turn(int rank, int peer, bool is_send) const;
  void begin_turn(int rank, int peer, bool is_send);
  bool begin_turn_of_send();
  bool take_receipt();
  void arrive(int task, int rank, int work);
  void ask_to_meet(int work, int rank, int peer);
  bool has_free_slot(Pair pair) const;
  bool may_leave(Pair pair, const Work& send) const;
  bool lets_pass(int work, int peer) const;
  bool can_begin(const Work& work) const;
  bool begin_work();
  bool can_end(const Work& work) const;
  bool end_work();

  const OrderRule rule_;
  std::mt19937_64 random_;
  int num_ranks_ = 0;
  std::vector<Task> tasks_;
  std::vector<Work> works_;
  std::map<Pair, int> last_of_stream_;
  std::map<Pair, int> last_of_queue_;  // by rank and queue
  std::map<int, int> last_meeting_;    // that the host of a rank has asked for
  std::map<Pair, bool> is_full_;
  std::map<Pair, int> last_sent_;  // over the lane
  std::map<Pair, int> read_by_;    // who was the last to read a slot
  std::map<Pair, std::deque<Message>> leaving_;
  std::map<Pair, std::deque<Message>> coming_;
  std::vector<std::pair<int, int>> late_;         // tasks and their work
  std::map<Pair, std::deque<int>> without_turn_;  // sends to higher ranks
  std::map<Pair, std::deque<int>> late_sends_;
  std::map<int, Turns> turns_;  // by rank
  // Copies that the sender of the receipt has asked for, by sending and
  // receiving rank of the receipt.
  std::map<Pair, std::deque<int>> receipts_;
  int num_over_lanes_ = 0;
  int num_through_hosts_ = 0;
};

}  // namespace smp::lanes
