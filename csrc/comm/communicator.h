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

/// Another rank and the stamp of its call (`Communicator::stamp_next`).
struct OtherCall {
  int group_rank = -1;  ///< -1: unknown
  uint64_t stamp = 0;   ///< 0: none was given
};

/// An error on all ranks whose calls of one collective differ. The communicator
/// can still be used.
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

/// An operation in flight. The Work keeps the operation's tensors alive until
/// it is destroyed; read or reuse them only after `wait`.
class Work {
 public:
  virtual ~Work() = default;

  /// Returns true once the operation has finished, with or without an error.
  virtual bool done() = 0;

  /// Blocks until the operation has finished.
  /// @throws Error when it failed, was aborted, or `timeout` passed; the text
  ///         names the operation and the peer.
  virtual void wait(std::chrono::milliseconds timeout) = 0;

  /// Orders later work on the current stream of the device after the operation,
  /// without a wait of the host. The tensors may then be used on that stream. A
  /// failure shows in a later `wait`.
  /// @return false if the host has to `wait`: the operation is not a device's
  virtual bool order_stream() { return false; }

  /// Makes a `wait` in another thread return with an error soon.
  virtual void abort() {}

  /// Returns the collective of this work, if its communicator counts
  /// collectives (WatchedCommunicator).
  const std::optional<health::CollectiveId>& collective() const {
    return collective_;
  }
  void set_collective(health::CollectiveId id) { collective_ = std::move(id); }

  /// The board whose faults end a wait, and words for the operation.
  struct WaitContext {
    std::shared_ptr<health::FaultBoard> faults;  ///< null: faults end no wait
    std::string_view operation;                  ///< must outlive the work
    std::shared_ptr<const std::string> group;    ///< "gloo:dp (2 ranks)"
  };
  const WaitContext& wait_context() const { return wait_context_; }
  void set_wait_context(WaitContext wait_context) {
    wait_context_ = std::move(wait_context);
  }

 private:
  std::optional<health::CollectiveId> collective_;
  WaitContext wait_context_;
};

using WorkPtr = std::shared_ptr<Work>;

/// A group of ranks that exchange tensors. Point-to-point messages between two
/// ranks with one tag arrive in the order they were sent; sizes and dtypes of
/// both sides must agree. All ranks issue collectives in one order. Every call
/// returns at once. Tensors are contiguous and on the device that the backend
/// serves. Thread-safe: any thread may call.
class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int group_rank() const = 0;
  virtual int size() const = 0;
  /// Returns words for errors and logs, for instance "gloo:dp".
  virtual const std::string& name() const = 0;

  virtual WorkPtr send(const at::Tensor& tensor, int dst, int tag) = 0;
  virtual WorkPtr recv(at::Tensor tensor, int src, int tag) = 0;

  virtual WorkPtr all_reduce(at::Tensor tensor, ReduceOp op) = 0;
  virtual WorkPtr broadcast(at::Tensor tensor, int root) = 0;
  /// Gathers `input`, [n], into `output`, [size * n], ordered by group rank.
  virtual WorkPtr all_gather(at::Tensor output, const at::Tensor& input) = 0;
  /// Reduces `input`, [size * n], and scatters parts into `output`, [n].
  virtual WorkPtr reduce_scatter(at::Tensor output, const at::Tensor& input,
                                 ReduceOp op) = 0;
  /// Sends part i of `input` to group rank i, and receives part i of `output`
  /// from it. Both are [size * n].
  virtual WorkPtr all_to_all(at::Tensor output, const at::Tensor& input) = 0;
  /// Exchanges parts of any size, including 0. The first `input_counts[0]`
  /// elements of the input are sent to group rank 0, and so on; the first
  /// `output_counts[0]` of the output come from it. The number that a rank
  /// sends must be the number that the receiver expects. A communicator that
  /// compares stamps (`stamp_next`) compares these numbers as well, and raises
  /// a `Disagreement` on all ranks. With any other one, ranks have to compare
  /// them first, see `agreement.h`: a backend called with other numbers breaks
  /// or waits.
  virtual WorkPtr all_to_all_v(at::Tensor output, const at::Tensor& input,
                               const Counts& output_counts,
                               const Counts& input_counts) = 0;
  virtual WorkPtr barrier() = 0;

  /// Gives the next collective that this thread issues a number that must be
  /// equal on all ranks, for instance a hash of shapes.
  /// @return true if ranks that disagree on this or on any argument get a
  ///         `Disagreement`; false if the number is not compared
  virtual bool stamp_next(uint64_t /*stamp*/) { return false; }

  /// Returns whether a collective that all ranks have issued ends although some
  /// of them wait for something else.
  virtual bool goes_on_alone() const { return true; }

  /// Returns whether collectives run on streams of a device: their works have
  /// `order_stream`, and the host need not wait for them.
  virtual bool is_stream_ordered() const { return false; }

  /// Ends all operations in flight with an error, in this process only.
  /// Operations of a device also end, soon after the call. Further calls raise.
  /// May be called twice and from any thread.
  virtual void abort() = 0;

  /// Ends the group in order, when no rank needs it any more: waits for the
  /// device, then frees what the group has on it. All ranks of a group call it,
  /// and end their groups in one order. Further calls raise. Does nothing on
  /// the host and after `abort`; never raises.
  virtual void shut_down() noexcept {}
};

using CommunicatorPtr = std::shared_ptr<Communicator>;

}  // namespace smp::comm
