#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "csrc/mailbox/message.h"
#include "csrc/memory/mark.h"

namespace smp::pipeline {

/// Stores the data of refs on one rank, and the callbacks that wait for data
/// still to be made or to arrive. Thread-safe; callbacks run without its lock,
/// in the order in which they were given, in the thread that brings the data.
/// That thread keeps no reference: the callback that gets the data last may
/// free them. Data are here as soon as they are marked on a stream: only code
/// that reads them waits for their marks.
class TensorStore {
 public:
  using Callback = std::function<void(memory::MarkedTensor)>;

  /// Stores the data of a ref. A second call is ignored.
  void put(const mailbox::Ref& ref, int64_t mb, memory::MarkedTensor tensor);
  /// Calls back when the data are here, at once if they are.
  void when_available(const mailbox::Ref& ref, int64_t mb, Callback callback);
  /// Returns the data if they are here, else an undefined tensor.
  memory::MarkedTensor find(const mailbox::Ref& ref) const;
  /// Notes that no code will ask for the ref again; callbacks that wait are
  /// served first.
  /// @param mb  microbatch until whose end an unknown ref is remembered as
  ///     released
  void release(const mailbox::Ref& ref, int64_t mb);
  /// Forgets all refs of a microbatch that is over.
  void drop_microbatch(int64_t mb);
  void clear();
  int64_t size() const;

 private:
  struct Hash {
    size_t operator()(const mailbox::Ref& ref) const {
      return std::hash<int64_t>()(ref.id * 1021 + ref.owner_rank);
    }
  };
  struct Equal {
    bool operator()(const mailbox::Ref& a, const mailbox::Ref& b) const {
      return a.id == b.id && a.owner_rank == b.owner_rank;
    }
  };
  struct Entry {
    int64_t mb = 0;
    memory::MarkedTensor tensor;
    bool is_released = false;
    std::vector<Callback> waiting;
  };

  mutable std::mutex mutex_;
  std::unordered_map<mailbox::Ref, Entry, Hash, Equal> entries_;
};

}  // namespace smp::pipeline
