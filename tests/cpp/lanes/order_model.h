#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <random>
#include <utility>
#include <vector>

namespace smp::lanes {

/// What ranks of the model do, and what they may do other than the library.
struct OrderRule {
  /// A copy of the receiver and that of the sender end together, as with NCCL;
  /// else the receiver's comes after, as out of memory that both can see.
  bool has_rendezvous = false;
  /// Sends and receives of a rank share one stream.
  bool one_stream_for_both_ways = false;
  /// A message leaves when its task is chosen; devices are asked for it later.
  bool header_before_producer = false;
};

/// Ranks whose hosts run ahead of their devices, without a line of the library:
/// the rule of docs/design/device_lanes.md and nothing else. The tasks of a
/// random graph lie on random ranks. A host asks its device for a task when the
/// messages of all its inputs have come. Results travel over lanes of one slot,
/// and through the host, which waits for their copy before the message leaves,
/// while the slot is in use. Streams do what they were asked for in order.
/// Hosts and devices take their steps in a random order, until none can.
class OrderModel {
 public:
  OrderModel(uint64_t seed, OrderRule rule);

  /// @return whether all ends. False: something waits for itself
  bool run();

  int num_over_lanes() const { return num_over_lanes_; }
  int num_through_hosts() const { return num_through_hosts_; }

 private:
  // What a device is asked for.
  struct Work {
    bool is_asked = false;
    bool is_done = false;
    bool needs_partner = false;
    int partner = -1;
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
  void arrive(int task, int rank, int work);
  bool can_end(const Work& work) const;
  bool end_work();

  const OrderRule rule_;
  std::mt19937_64 random_;
  int num_ranks_ = 0;
  std::vector<Task> tasks_;
  std::vector<Work> works_;
  std::map<Pair, int> last_of_stream_;
  std::map<Pair, bool> is_full_;
  std::map<Pair, int> read_by_;  // who was the last to read a slot
  std::map<Pair, std::deque<Message>> leaving_;
  std::map<Pair, std::deque<Message>> coming_;
  std::vector<std::pair<int, int>> late_;  // tasks and their work
  int num_over_lanes_ = 0;
  int num_through_hosts_ = 0;
};

}  // namespace smp::lanes
