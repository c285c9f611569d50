#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "csrc/common/check.h"
#include "csrc/health/collective_log.h"
#include "csrc/health/fault_board.h"

namespace smp::comm {

enum class ReduceOp { kSum, kMax, kMin };

/// Another rank, and the stamp of what it called (`Communicator::stamp_next`).
struct OtherCall {
  int group_rank = -1;  ///< -1: unknown
  uint64_t stamp = 0;   ///< 0: none was given
};

/// The ranks called different things with one collective; each of them gets
/// this error, and the communicator can still be used.
class Disagreement : public Error {
 public:
  /// @param other  rank whose call differs from that of this rank
  explicit Disagreement(const std::string& text, OtherCall other = {})
      : Error(text), other_(other) {}

  OtherCall other() const { return other_; }

 private:
  OtherCall other_;
};

/// Numbers of elements, by group rank.
using Counts = std::vector<int64_t>;

/// One operation in flight. Tensors given to the operation are kept alive by
/// the Work until it is destroyed; read or reuse them only after `wait`.
class Work {
 public:
  virtual ~Work() = default;

  /// True once the operation has finished, with or without an error.
  virtual bool done() = 0;

  /// Blocks until the operation has finished.
  /// @throws Error when it failed, was aborted, or `timeout` passed; the text
  ///         names the operation and the peer.
  virtual void wait(std::chrono::milliseconds timeout) = 0;

  /// What is queued on the current stream of the device from now on comes after
  /// the operation, for which the host does not wait. The tensors may be used
  /// on that stream then. A failure shows in a later `wait`.
  /// @return false if the host has to `wait`: the operation is not a device's
  virtual bool order_stream() { return false; }

  /// Group rank of the sender; valid after `wait` of a `recv_any`.
  virtual int source_rank() const { return -1; }

  /// Makes a `wait` in another thread return with an error soon.
  virtual void abort() {}

  /// Which collective this is, where somebody counts (WatchedCommunicator).
  const std::optional<health::CollectiveId>& collective() const {
    return collective_;
  }
  void set_collective(health::CollectiveId id) { collective_ = std::move(id); }

  /// Who knows of faults that end a wait for it, and what to call it there.
  struct Care {
    std::shared_ptr<health::FaultBoard> faults;  ///< null: nobody knows
    std::string_view operation;                  ///< lives as long as we do
    std::shared_ptr<const std::string> group;    ///< "gloo:dp (2 ranks)"
  };
  const Care& care() const { return care_; }
  void set_care(Care care) { care_ = std::move(care); }

 private:
  std::optional<health::CollectiveId> collective_;
  Care care_;
};

using WorkPtr = std::shared_ptr<Work>;

/// A group of ranks that exchange tensors. Point-to-point messages between two
/// ranks with one tag arrive in the order they were sent; sizes and dtypes of
/// both sides must agree. Collectives are issued by all ranks in one order.
/// Every call returns at once. Tensors are contiguous and on the device that
/// the backend serves. Thread-safe: any thread may call.
class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int group_rank() const = 0;
  virtual int size() const = 0;
  /// Words for errors and logs, for instance "gloo:dp".
  virtual const std::string& name() const = 0;

  virtual WorkPtr send(const at::Tensor& tensor, int dst, int tag) = 0;
  virtual WorkPtr recv(at::Tensor tensor, int src, int tag) = 0;
  /// Receives from the rank that sends first with this tag (see `source_rank`).
  virtual WorkPtr recv_any(at::Tensor tensor, int tag) = 0;

  virtual WorkPtr all_reduce(at::Tensor tensor, ReduceOp op) = 0;
  virtual WorkPtr broadcast(at::Tensor tensor, int root) = 0;
  /// `output` is [size * n], `input` is [n]; ordered by group rank.
  virtual WorkPtr all_gather(at::Tensor output, const at::Tensor& input) = 0;
  /// `output` is [n], `input` is [size * n].
  virtual WorkPtr reduce_scatter(at::Tensor output, const at::Tensor& input,
                                 ReduceOp op) = 0;
  /// `output` and `input` are [size * n]: part i of the input goes to group
  /// rank i, and part i of the output comes from there.
  virtual WorkPtr all_to_all(at::Tensor output, const at::Tensor& input) = 0;
  /// `all_to_all` with parts of any size, also none: the first
  /// `input_counts[0]` elements of the input go to group rank 0, and so on; the
  /// first `output_counts[0]` of the output come from there. What a rank sends
  /// to another one must be what that one expects. A communicator that compares
  /// stamps (`stamp_next`) compares these numbers as well, and all ranks get a
  /// `Disagreement`; elsewhere the ranks have to compare them before, see
  /// `agreement.h`: a backend that was called with others breaks or waits.
  virtual WorkPtr all_to_all_v(at::Tensor output, const at::Tensor& input,
                               const Counts& output_counts,
                               const Counts& input_counts) = 0;
  virtual WorkPtr barrier() = 0;

  /// Gives the next collective that this thread issues a number that all ranks
  /// must have equal, for instance a hash of shapes.
  /// @return false where nobody would notice a difference; true where ranks
  ///         that disagree on this or on any argument get a `Disagreement`
  virtual bool stamp_next(uint64_t /*stamp*/) { return false; }

  /// Whether a collective that all ranks have issued ends although some of
  /// them wait for something else.
  virtual bool goes_on_alone() const { return true; }

  /// Whether collectives run on streams of a device: their works have
  /// `order_stream`, and nobody on the host has to wait for one.
  virtual bool is_stream_ordered() const { return false; }

  /// Ends all operations in flight with an error, in this process only. Those
  /// of a device end there, too, soon after the call.
  /// Further calls raise. May be called twice and from any thread.
  virtual void abort() = 0;
};

using CommunicatorPtr = std::shared_ptr<Communicator>;

}  // namespace smp::comm
