#include "csrc/shm/shared_operation.h"

#include <ATen/ops/add.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <sstream>
#include <utility>
#include <vector>

#include "csrc/common/check.h"

namespace smp::shm {
namespace {

using OperationKind = SharedOperation::Kind;

// Alignment of chunks of parts, for vector units.
constexpr int64_t kAlignment = 64;
// Largest tensor for which each rank adds up everything itself, in one phase.
constexpr int64_t kOneShotBytes = 32 << 10;

uint8_t* bytes_of(const at::Tensor& tensor) {
  return static_cast<uint8_t*>(tensor.mutable_data_ptr());
}

void copy_bytes(void* to, const void* from, int64_t num_bytes) {
  if (num_bytes > 0) std::memcpy(to, from, static_cast<size_t>(num_bytes));
}

// Turns off autograd and modes of Python.
struct PlainDispatch {
  c10::impl::ExcludeDispatchKeyGuard no_autograd{
      c10::autograd_dispatch_keyset_with_ADInplaceOrView};
  c10::impl::ExcludeDispatchKeyGuard no_python{c10::python_ks};
};

// Combines the parts of the ranks, in their order.
class Combiner {
 public:
  Combiner(at::ScalarType dtype, comm::ReduceOp op)
      : dtype_(dtype),
        element_bytes_(static_cast<int64_t>(c10::elementSize(dtype))),
        op_(op) {}

  void run(uint8_t* to, const std::vector<const uint8_t*>& parts,
           int64_t num_bytes) const {
    if (num_bytes == 0) return;
    const PlainDispatch plain;
    const bool is_half = dtype_ == at::kHalf || dtype_ == at::kBFloat16;
    at::Tensor result = view(to, num_bytes);
    if (is_half && parts.size() > 2 && op_ == comm::ReduceOp::kSum) {
      at::Tensor sum = view(parts[0], num_bytes).to(at::kFloat);
      for (size_t i = 1; i < parts.size(); ++i) {
        sum.add_(view(parts[i], num_bytes));
      }
      result.copy_(sum);  // rounded once
      return;
    }
    combine(result, view(parts[0], num_bytes), view(parts[1], num_bytes));
    for (size_t i = 2; i < parts.size(); ++i) {
      combine(result, result, view(parts[i], num_bytes));
    }
  }

  int64_t element_bytes() const { return element_bytes_; }

 private:
  at::Tensor view(const uint8_t* bytes, int64_t num_bytes) const {
    return at::from_blob(const_cast<uint8_t*>(bytes),
                         {num_bytes / element_bytes_},
                         at::TensorOptions(dtype_));
  }

  void combine(at::Tensor& to, const at::Tensor& a, const at::Tensor& b) const {
    switch (op_) {
      case comm::ReduceOp::kSum:
        at::add_out(to, a, b);
        return;
      case comm::ReduceOp::kMax:
        at::maximum_out(to, a, b);
        return;
      case comm::ReduceOp::kMin:
        at::minimum_out(to, a, b);
        return;
    }
  }

  const at::ScalarType dtype_;
  const int64_t element_bytes_;
  const comm::ReduceOp op_;
};

CollectiveStamp stamp_for(OperationKind kind, uint64_t stamp,
                          const at::Tensor& tensor = {}, int root_or_op = -1) {
  CollectiveStamp result;
  result.operation = static_cast<int32_t>(kind);
  result.root_or_op = root_or_op;
  result.stamp = stamp;
  result.dtype = -1;
  if (tensor.defined()) {
    result.dtype = static_cast<int64_t>(tensor.scalar_type());
    result.num_bytes = static_cast<int64_t>(tensor.nbytes());
  }
  return result;
}

// The place of a chunk in a run of bytes.
struct Span {
  int64_t begin;
  int64_t size;

  Span(int64_t chunk, int64_t bytes_per_chunk, int64_t num_bytes)
      : begin(chunk * bytes_per_chunk),
        size(std::clamp<int64_t>(num_bytes - begin, 0, bytes_per_chunk)) {}
};

class AllReduce final : public SharedOperation {
 public:
  AllReduce(comm::CallName call, uint64_t stamp, at::Tensor tensor,
            comm::ReduceOp op)
      : SharedOperation(std::move(call),
                        stamp_for(OperationKind::kAllReduce, stamp, tensor,
                                  static_cast<int>(op)),
                        static_cast<int64_t>(tensor.nbytes()),
                        CollectiveMemory::kSlotBytes),
        tensor_(std::move(tensor)),
        data_(bytes_of(tensor_)),
        combiner_(tensor_.scalar_type(), op) {}

  // With two ranks, slices would save neither reads nor writes.
  bool combines() const override {
    return this->call.group->size > 2 && num_bytes() > kOneShotBytes;
  }

  void write(const CollectiveMemory& memory, int64_t chunk) override {
    const Span span = span_of(chunk);
    copy_bytes(memory.input(memory.group_rank()), data_ + span.begin,
               span.size);
  }

  // Combines this rank's slice for all ranks.
  void combine(const CollectiveMemory& memory, int64_t chunk) override {
    const auto [begin, end] = slice(memory, memory.group_rank(), chunk);
    combiner_.run(memory.result(memory.group_rank()) + begin,
                  inputs(memory, begin), end - begin);
  }

  void read(const CollectiveMemory& memory, int64_t chunk) override {
    const Span span = span_of(chunk);
    if (!combines()) {
      combiner_.run(data_ + span.begin, inputs(memory, 0), span.size);
      return;
    }
    for (int rank = 0; rank < memory.size(); ++rank) {
      const auto [begin, end] = slice(memory, rank, chunk);
      copy_bytes(data_ + span.begin + begin, memory.result(rank) + begin,
                 end - begin);
    }
  }

 private:
  int64_t num_bytes() const { return static_cast<int64_t>(tensor_.nbytes()); }

  Span span_of(int64_t chunk) const {
    return {chunk, CollectiveMemory::kSlotBytes, num_bytes()};
  }

  std::pair<int64_t, int64_t> slice(const CollectiveMemory& memory, int rank,
                                    int64_t chunk) const {
    const int64_t size = span_of(chunk).size;
    const int64_t each =
        (size / memory.size() + kAlignment - 1) / kAlignment * kAlignment;
    return {
        std::min(size, rank * each),
        rank + 1 == memory.size() ? size : std::min(size, (rank + 1) * each)};
  }

  static std::vector<const uint8_t*> inputs(const CollectiveMemory& memory,
                                            int64_t begin) {
    std::vector<const uint8_t*> parts;
    for (int rank = 0; rank < memory.size(); ++rank) {
      parts.push_back(memory.input(rank) + begin);
    }
    return parts;
  }

  const at::Tensor tensor_;
  uint8_t* const data_;
  const Combiner combiner_;
};

class Broadcast final : public SharedOperation {
 public:
  Broadcast(comm::CallName call, uint64_t stamp, at::Tensor tensor)
      : SharedOperation(
            call,
            stamp_for(OperationKind::kBroadcast, stamp, tensor, call.peer),
            static_cast<int64_t>(tensor.nbytes()),
            CollectiveMemory::kSlotBytes),
        tensor_(std::move(tensor)),
        data_(bytes_of(tensor_)) {}

  void write(const CollectiveMemory& memory, int64_t chunk) override {
    if (memory.group_rank() != call.peer) return;
    const Span span = span_of(chunk);
    copy_bytes(memory.input(call.peer), data_ + span.begin, span.size);
  }

  void read(const CollectiveMemory& memory, int64_t chunk) override {
    if (memory.group_rank() == call.peer) return;
    const Span span = span_of(chunk);
    copy_bytes(data_ + span.begin, memory.input(call.peer), span.size);
  }

 private:
  Span span_of(int64_t chunk) const {
    return {chunk, CollectiveMemory::kSlotBytes,
            static_cast<int64_t>(tensor_.nbytes())};
  }

  const at::Tensor tensor_;
  uint8_t* const data_;
};

class AllGather final : public SharedOperation {
 public:
  AllGather(comm::CallName call, uint64_t stamp, at::Tensor output,
            at::Tensor input)
      : SharedOperation(
            std::move(call), stamp_for(OperationKind::kAllGather, stamp, input),
            static_cast<int64_t>(input.nbytes()), CollectiveMemory::kSlotBytes),
        output_(std::move(output)),
        input_(std::move(input)),
        to_(bytes_of(output_)),
        from_(bytes_of(input_)),
        part_bytes_(static_cast<int64_t>(input_.nbytes())) {}

  void write(const CollectiveMemory& memory, int64_t chunk) override {
    const Span span = span_of(chunk);
    const int own = memory.group_rank();
    copy_bytes(memory.input(own), from_ + span.begin, span.size);
    uint8_t* to = to_ + own * part_bytes_ + span.begin;
    if (to != from_ + span.begin) {
      copy_bytes(to, from_ + span.begin, span.size);
    }
  }

  void read(const CollectiveMemory& memory, int64_t chunk) override {
    const Span span = span_of(chunk);
    for (int rank = 0; rank < memory.size(); ++rank) {
      if (rank == memory.group_rank()) continue;
      copy_bytes(to_ + rank * part_bytes_ + span.begin, memory.input(rank),
                 span.size);
    }
  }

 private:
  Span span_of(int64_t chunk) const {
    return {chunk, CollectiveMemory::kSlotBytes, part_bytes_};
  }

  const at::Tensor output_;
  const at::Tensor input_;
  uint8_t* const to_;
  const uint8_t* const from_;
  const int64_t part_bytes_;
};

// An operation in which each rank has a part for each other rank. A slot holds
// these parts, one after the other.
class PartPerRank : public SharedOperation {
 public:
  void write(const CollectiveMemory& memory, int64_t chunk) override {
    const Span span = span_of(chunk);
    const int own = memory.group_rank();
    for (int rank = 0; rank < memory.size(); ++rank) {
      if (rank == own) continue;
      copy_bytes(memory.input(own) + place(own, rank), part(rank, span),
                 span.size);
    }
  }

 protected:
  PartPerRank(comm::CallName call, const CollectiveStamp& stamp,
              at::Tensor output, at::Tensor input, int size)
      : SharedOperation(std::move(call), stamp,
                        static_cast<int64_t>(input.nbytes()) / size,
                        chunk_bytes(size)),
        output_(std::move(output)),
        input_(std::move(input)),
        part_bytes_(static_cast<int64_t>(input_.nbytes()) / size),
        chunk_bytes_(chunk_bytes(size)) {}

  static int64_t chunk_bytes(int size) {
    return CollectiveMemory::kSlotBytes / (size - 1) / kAlignment * kAlignment;
  }

  Span span_of(int64_t chunk) const {
    return {chunk, chunk_bytes_, part_bytes_};
  }

  // Returns the part of this rank for another one.
  const uint8_t* part(int rank, const Span& span) const {
    return bytes_of(input_) + rank * part_bytes_ + span.begin;
  }

  // Returns the part of another rank for this one.
  const uint8_t* received(const CollectiveMemory& memory, int rank) const {
    return memory.input(rank) + place(rank, memory.group_rank());
  }

  uint8_t* output(int64_t begin) const { return bytes_of(output_) + begin; }
  int64_t part_bytes() const { return part_bytes_; }

 private:
  int64_t place(int from, int to) const {
    return (to < from ? to : to - 1) * chunk_bytes_;
  }

  const at::Tensor output_;
  const at::Tensor input_;
  const int64_t part_bytes_;
  const int64_t chunk_bytes_;
};

class ReduceScatter final : public PartPerRank {
 public:
  ReduceScatter(comm::CallName call, uint64_t stamp, at::Tensor output,
                at::Tensor input, comm::ReduceOp op)
      : PartPerRank(call,
                    stamp_for(OperationKind::kReduceScatter, stamp, input,
                              static_cast<int>(op)),
                    output, input, call.group->size),
        combiner_(input.scalar_type(), op) {}

  void read(const CollectiveMemory& memory, int64_t chunk) override {
    const Span span = span_of(chunk);
    std::vector<const uint8_t*> parts;
    for (int rank = 0; rank < memory.size(); ++rank) {
      parts.push_back(rank == memory.group_rank() ? part(rank, span)
                                                  : received(memory, rank));
    }
    combiner_.run(output(span.begin), parts, span.size);
  }

 private:
  const Combiner combiner_;
};

class AllToAll final : public PartPerRank {
 public:
  AllToAll(comm::CallName call, uint64_t stamp, at::Tensor output,
           at::Tensor input)
      : PartPerRank(call, stamp_for(OperationKind::kAllToAll, stamp, input),
                    output, input, call.group->size) {}

  void read(const CollectiveMemory& memory, int64_t chunk) override {
    const Span span = span_of(chunk);
    for (int rank = 0; rank < memory.size(); ++rank) {
      copy_bytes(output(rank * part_bytes() + span.begin),
                 rank == memory.group_rank() ? part(rank, span)
                                             : received(memory, rank),
                 span.size);
    }
  }
};

// Exchanges parts of different sizes. Chunks begin with the counts of the rank.
// The others compare the counts in the first chunk, and compute from them how
// many chunks there are.
class AllToAllV final : public SharedOperation {
 public:
  AllToAllV(comm::CallName call, uint64_t stamp, at::Tensor output,
            at::Tensor input, comm::Counts output_counts,
            comm::Counts input_counts)
      : SharedOperation(call, stamp_of(stamp, input), 0, 1),
        output_(std::move(output)),
        input_(std::move(input)),
        received_(std::move(output_counts)),
        sent_(std::move(input_counts)),
        element_bytes_(static_cast<int64_t>(input_.element_size())),
        num_ranks_(static_cast<int64_t>(sent_.size())),
        table_bytes_((2 * num_ranks_ * kCountBytes + kAlignment - 1) /
                     kAlignment * kAlignment),
        chunk_bytes_((CollectiveMemory::kSlotBytes - table_bytes_) /
                     std::max<int64_t>(1, num_ranks_ - 1) / kAlignment *
                     kAlignment) {
    SMP_CHECK(chunk_bytes_ > 0, this->call.text(), ": ", num_ranks_,
              " ranks are too many for memory that they share");
  }

  void write(const CollectiveMemory& memory, int64_t chunk) override {
    const int own = memory.group_rank();
    uint8_t* const slot = memory.input(own);
    if (chunk == 0) {
      copy_bytes(slot, sent_.data(), num_ranks_ * kCountBytes);
      copy_bytes(slot + num_ranks_ * kCountBytes, received_.data(),
                 num_ranks_ * kCountBytes);
    }
    int64_t begin = 0;
    for (int rank = 0; rank < memory.size(); ++rank) {
      const int64_t num_bytes = sent_[rank] * element_bytes_;
      const Span span(chunk, chunk_bytes_, num_bytes);
      if (rank != own) {
        copy_bytes(slot + place(own, rank),
                   bytes_of(input_) + begin + span.begin, span.size);
      }
      begin += num_bytes;
    }
  }

  std::string disagreement(const CollectiveMemory& memory) const override {
    std::vector<comm::Counts> sent;
    std::vector<comm::Counts> received;
    for (int rank = 0; rank < memory.size(); ++rank) {
      sent.push_back(counts(memory, rank, 0));
      received.push_back(counts(memory, rank, 1));
    }
    return comm::count_disagreement(sent, received);
  }

  void read(const CollectiveMemory& memory, int64_t chunk) override {
    if (chunk == 0) {
      int64_t largest = 0;
      for (int rank = 0; rank < memory.size(); ++rank) {
        const comm::Counts of_rank = counts(memory, rank, 0);
        for (int64_t to = 0; to < num_ranks_; ++to) {
          if (to != rank) largest = std::max(largest, of_rank[to]);
        }
      }
      set_num_bytes(largest * element_bytes_, chunk_bytes_);
      copy_own(memory.group_rank());
    }
    const int own = memory.group_rank();
    int64_t begin = 0;
    for (int rank = 0; rank < memory.size(); ++rank) {
      const int64_t num_bytes = received_[rank] * element_bytes_;
      const Span span(chunk, chunk_bytes_, num_bytes);
      if (rank != own) {
        copy_bytes(bytes_of(output_) + begin + span.begin,
                   memory.input(rank) + place(rank, own), span.size);
      }
      begin += num_bytes;
    }
  }

 private:
  static constexpr auto kCountBytes = static_cast<int64_t>(sizeof(int64_t));

  // The stamp has no size, because sizes differ between ranks.
  static CollectiveStamp stamp_of(uint64_t stamp, const at::Tensor& tensor) {
    CollectiveStamp result =
        stamp_for(OperationKind::kAllToAllV, stamp, tensor);
    result.num_bytes = -1;
    return result;
  }

  comm::Counts counts(const CollectiveMemory& memory, int rank,
                      int64_t row) const {
    comm::Counts result(num_ranks_);
    copy_bytes(result.data(),
               memory.input(rank) + row * num_ranks_ * kCountBytes,
               num_ranks_ * kCountBytes);
    return result;
  }

  int64_t place(int from, int to) const {
    return table_bytes_ + (to < from ? to : to - 1) * chunk_bytes_;
  }

  // Copies the part of this rank for itself.
  void copy_own(int own) {
    const auto begin = [&](const comm::Counts& counts) {
      return std::accumulate(counts.begin(), counts.begin() + own, int64_t{0}) *
             element_bytes_;
    };
    copy_bytes(bytes_of(output_) + begin(received_),
               bytes_of(input_) + begin(sent_), sent_[own] * element_bytes_);
  }

  const at::Tensor output_;
  const at::Tensor input_;
  const comm::Counts received_;
  const comm::Counts sent_;
  const int64_t element_bytes_;
  const int64_t num_ranks_;
  const int64_t table_bytes_;
  const int64_t chunk_bytes_;
};

class Barrier final : public SharedOperation {
 public:
  Barrier(comm::CallName call, uint64_t stamp)
      : SharedOperation(std::move(call),
                        stamp_for(OperationKind::kBarrier, stamp), 0,
                        CollectiveMemory::kSlotBytes) {}
};

}  // namespace

SharedOperation::SharedOperation(comm::CallName call,
                                 const CollectiveStamp& stamp,
                                 int64_t num_bytes, int64_t bytes_per_chunk)
    : call(std::move(call)), stamp(stamp) {
  set_num_bytes(num_bytes, bytes_per_chunk);
}

void SharedOperation::set_num_bytes(int64_t num_bytes,
                                    int64_t bytes_per_chunk) {
  num_chunks_ =
      std::max<int64_t>(1, (num_bytes + bytes_per_chunk - 1) / bytes_per_chunk);
}

SharedOperationPtr make_all_reduce(comm::CallName call, uint64_t stamp,
                                   at::Tensor tensor, comm::ReduceOp op) {
  return std::make_shared<AllReduce>(std::move(call), stamp, std::move(tensor),
                                     op);
}

SharedOperationPtr make_broadcast(comm::CallName call, uint64_t stamp,
                                  at::Tensor tensor) {
  return std::make_shared<Broadcast>(std::move(call), stamp, std::move(tensor));
}

SharedOperationPtr make_all_gather(comm::CallName call, uint64_t stamp,
                                   at::Tensor output, at::Tensor input) {
  return std::make_shared<AllGather>(std::move(call), stamp, std::move(output),
                                     std::move(input));
}

SharedOperationPtr make_reduce_scatter(comm::CallName call, uint64_t stamp,
                                       at::Tensor output, at::Tensor input,
                                       comm::ReduceOp op) {
  return std::make_shared<ReduceScatter>(
      std::move(call), stamp, std::move(output), std::move(input), op);
}

SharedOperationPtr make_all_to_all(comm::CallName call, uint64_t stamp,
                                   at::Tensor output, at::Tensor input) {
  return std::make_shared<AllToAll>(std::move(call), stamp, std::move(output),
                                    std::move(input));
}

SharedOperationPtr make_all_to_all_v(comm::CallName call, uint64_t stamp,
                                     at::Tensor output, at::Tensor input,
                                     comm::Counts output_counts,
                                     comm::Counts input_counts) {
  return std::make_shared<AllToAllV>(std::move(call), stamp, std::move(output),
                                     std::move(input), std::move(output_counts),
                                     std::move(input_counts));
}

SharedOperationPtr make_shared_barrier(comm::CallName call, uint64_t stamp) {
  return std::make_shared<Barrier>(std::move(call), stamp);
}

std::string describe_stamp(const CollectiveStamp& stamp) {
  constexpr std::array<const char*, 8> kNames = {
      "nothing",        "all_reduce", "broadcast",    "all_gather",
      "reduce_scatter", "all_to_all", "all_to_all_v", "barrier"};
  std::ostringstream out;
  out << kNames[static_cast<size_t>(stamp.operation)];
  if (stamp.operation == static_cast<int32_t>(OperationKind::kBroadcast)) {
    out << "(root=" << stamp.root_or_op << ')';
  }
  if (stamp.dtype >= 0) {
    out << " of ";
    if (stamp.num_bytes >= 0) out << stamp.num_bytes << " bytes of ";
    out << c10::toString(static_cast<c10::ScalarType>(stamp.dtype));
  }
  return out.str();
}

}  // namespace smp::shm
