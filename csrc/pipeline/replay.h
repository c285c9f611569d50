#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "csrc/comm/message.h"
#include "csrc/pipeline/wire.h"

namespace smp::pipeline {

/// Ids of requests and arguments that one recorded context may give. They are
/// consecutive and begin at a multiple of this, so that what a request names
/// has the same numbers in every microbatch, counted from the beginning.
constexpr int64_t kIdsPerContext = 1 << 16;

/// A request with all numbers counted from the beginning of its context, so
/// that it is the same in each microbatch that does the same. What differs
/// from one to the next (data, seed, what is released) is not part of it.
struct RecordedRequest {
  struct Tensor {
    int64_t ref_idx = -1;  ///< -1: without a name
    bool has_data = false;
    bool requires_grad = false;
    bool operator==(const Tensor&) const = default;
  };

  Kind kind = Kind::kForwardRequest;
  int64_t module_id = 0;
  int64_t flags = 0;
  int64_t request_idx = 0;
  int64_t forward_id = 0;  ///< backward: index; forward: as in the header
  int64_t call_idx = 0;    ///< which forward of the context; its seed
  std::string structure;   ///< with the route
  std::vector<Tensor> tensors;

  bool operator==(const RecordedRequest&) const = default;
  size_t num_bytes() const;

  /// @param tensors  without those that are only released
  /// @param caller   global rank that named the tensors
  /// @return nothing when the request names what its context did not
  static std::optional<RecordedRequest> of(
      const Header& header, const std::vector<comm::MessageTensor>& tensors,
      const std::string& structure, int caller);

  /// The request again, in another microbatch.
  /// @param progress  of the context: step, microbatch, seed, an id
  /// @param data      of the tensors that have data, from `next` on
  std::pair<Header, comm::Message> restore(
      const Header& progress, int caller,
      std::vector<comm::MessageTensor>& data, size_t& next) const;
};

/// What contexts of one rank asked of another one: a tree, since programs that
/// begin in the same way may go on differently. A path from the start is the
/// program of a microbatch. Both ranks add the same requests in the same order,
/// so that a number says which node is meant.
class Programs {
 public:
  static constexpr int kStart = 0;
  static constexpr int kLeft = -1;  ///< of a context that is not recorded

  Programs() : nodes_(1) {}

  /// Where `request` leads to, if it was seen there before; else kLeft.
  int find(int node, const RecordedRequest& request) const;
  /// Whether the caller should rather not add anything behind `node`.
  bool is_full(int node) const;
  int add(int node, RecordedRequest request);
  /// The requests on the way. @throws Error when there is no such way
  std::vector<const RecordedRequest*> between(int from, int to) const;
  int size() const { return static_cast<int>(nodes_.size()) - 1; }

  /// Caller: how soon another request to the same owner followed this one.
  void note_follower(int node, std::chrono::nanoseconds after);
  void note_no_follower(int node);
  /// Whether one will follow within moments, as far as is known.
  bool has_follower(int node) const;

 private:
  // Values that change with each batch must not fill the memory.
  static constexpr int kMaxNodes = 1 << 14;
  static constexpr size_t kMaxChildren = 64;
  static constexpr size_t kMaxBytes = 8 << 20;

  struct Node {
    int parent = kLeft;
    RecordedRequest request;
    std::vector<int> children;
    std::optional<std::chrono::nanoseconds> follower;  // a mean
  };

  std::deque<Node> nodes_;
  size_t num_bytes_ = 0;
};

/// The programs that an owner has been told, by caller. Thread-safe.
class ServedPrograms {
 public:
  /// A request that arrived whole continues the program of its context.
  void record(const Header& header,
              const std::vector<comm::MessageTensor>& tensors,
              const std::string& structure, int caller);
  /// The requests that a message of Kind::kProgress stands for.
  std::vector<std::pair<Header, comm::Message>> follow(const Header& progress,
                                                       comm::Message&& message);
  /// Another step begins. @param forget  the programs as well
  void begin_step(bool forget);

 private:
  std::mutex mutex_;
  std::map<int, Programs> programs_;
  std::map<std::pair<int, int64_t>, int> nodes_;  // by caller and its context
};

}  // namespace smp::pipeline
