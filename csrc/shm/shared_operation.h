#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "csrc/comm/communicator.h"
#include "csrc/comm/communicator_checks.h"
#include "csrc/shm/collective_memory.h"

namespace smp::shm {

/// A collective of one rank over `CollectiveMemory`, chunk by chunk: `write`, a
/// phase, perhaps `combine` and another phase, `read`.
class SharedOperation {
 public:
  enum class Kind : int32_t {
    kAllReduce = 1,
    kBroadcast,
    kAllGather,
    kReduceScatter,
    kAllToAll,
    kAllToAllV,
    kBarrier
  };

  virtual ~SharedOperation() = default;

  /// Returns the number of chunks; final once the first chunk was read.
  int64_t num_chunks() const { return num_chunks_; }
  /// Returns how ranks with equal stamps disagree, in words that are the same
  /// on all ranks; empty: they agree. Call it in the first chunk, before
  /// `read`.
  virtual std::string disagreement(const CollectiveMemory&) const { return {}; }
  virtual void write(const CollectiveMemory&, int64_t /*chunk*/) {}
  virtual bool combines() const { return false; }
  virtual void combine(const CollectiveMemory&, int64_t /*chunk*/) {}
  virtual void read(const CollectiveMemory&, int64_t /*chunk*/) {}

  const comm::CallName call;
  const CollectiveStamp stamp;

 protected:
  SharedOperation(comm::CallName call, const CollectiveStamp& stamp,
                  int64_t num_bytes, int64_t bytes_per_chunk);

  /// Sets the size for an operation whose size is the largest part of any rank.
  void set_num_bytes(int64_t num_bytes, int64_t bytes_per_chunk);

 private:
  int64_t num_chunks_;
};

using SharedOperationPtr = std::shared_ptr<SharedOperation>;

/// Makes an operation. `stamp` is the user's; tensors have been checked.
SharedOperationPtr make_all_reduce(comm::CallName call, uint64_t stamp,
                                   at::Tensor tensor, comm::ReduceOp op);
SharedOperationPtr make_broadcast(comm::CallName call, uint64_t stamp,
                                  at::Tensor tensor);
SharedOperationPtr make_all_gather(comm::CallName call, uint64_t stamp,
                                   at::Tensor output, at::Tensor input);
SharedOperationPtr make_reduce_scatter(comm::CallName call, uint64_t stamp,
                                       at::Tensor output, at::Tensor input,
                                       comm::ReduceOp op);
SharedOperationPtr make_all_to_all(comm::CallName call, uint64_t stamp,
                                   at::Tensor output, at::Tensor input);
SharedOperationPtr make_all_to_all_v(comm::CallName call, uint64_t stamp,
                                     at::Tensor output, at::Tensor input,
                                     comm::Counts output_counts,
                                     comm::Counts input_counts);
SharedOperationPtr make_shared_barrier(comm::CallName call, uint64_t stamp);

/// Returns words such as "all_gather of 24 bytes of Float".
std::string describe_stamp(const CollectiveStamp& stamp);

}  // namespace smp::shm
