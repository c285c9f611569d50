#include "csrc/comm/socket_collectives.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "csrc/comm/reduce_into.h"
#include "csrc/common/check.h"

namespace smp::comm {
namespace {

// Most bytes in all for which each rank gets everything in log2(n) steps and
// adds it up itself.
constexpr int64_t kReduceByGatherBytes = 64 << 10;
constexpr int64_t kTinyBytes = 256;
// Most bytes in all for which a gather takes log2(n) steps and a copy.
constexpr int64_t kGatherInStepsBytes = 1 << 20;
constexpr int64_t kShortPartBytes = 4 << 10;
// Bytes of a piece; a ring sends one piece on while the next one comes.
constexpr int64_t kPieceBytes = 512 << 10;
// Number of receives that a ring has posted ahead.
constexpr size_t kAhead = 4;
// Longer ones are acknowledged, so that the root does not run ahead.
constexpr int64_t kUnacknowledgedBytes = 256 << 10;
constexpr auto kForever = std::chrono::hours(24 * 365);

// Returns chunk `index` of `count`, in pieces that are sent one by one.
std::vector<at::Tensor> pieces_of(const at::Tensor& tensor, int index,
                                  int count) {
  const int64_t begin = tensor.numel() * index / count;
  const int64_t end = tensor.numel() * (index + 1) / count;
  const int64_t step = std::max<int64_t>(
      1, kPieceBytes / static_cast<int64_t>(tensor.element_size()));
  std::vector<at::Tensor> pieces;
  for (int64_t at = begin; at < end; at += step) {
    pieces.push_back(tensor.narrow(0, at, std::min(step, end - at)));
  }
  return pieces;
}

}  // namespace

SocketCollective::SocketCollective(SocketExchange& exchange, uint64_t tag,
                                   uint64_t note)
    : exchange_(exchange),
      tag_(tag),
      note_(note),
      rank_(exchange.group_rank()),
      size_(exchange.size()) {}

// --------------------------------------------------------------------- steps

void SocketCollective::send(int dst, const at::Tensor& part,
                            uint64_t tag_offset) {
  auto owner = std::make_shared<at::Tensor>(part);
  sends_.push_back(exchange_.send(dst, tag_ + tag_offset, note_,
                                  part.const_data_ptr(), part.nbytes(),
                                  std::move(owner)));
}

SocketCollective::TransferPtr SocketCollective::begin_receive(
    int src, const at::Tensor& part, uint64_t tag_offset) {
  auto owner = std::make_shared<at::Tensor>(part);
  return exchange_.receive(src, tag_ + tag_offset, note_,
                           part.mutable_data_ptr(), part.nbytes(),
                           std::move(owner));
}

void SocketCollective::end(const TransferPtr& transfer) {
  exchange_.wait_until(*transfer, std::chrono::steady_clock::now() + kForever);
  if (transfer->state == SocketExchange::Transfer::State::kSucceeded) return;
  if (transfer->does_not_fit) {
    throw Error(detail::concat(
        "group rank ", transfer->peer,
        " called another collective of this group, or with other sizes or "
        "dtypes: it sent ",
        transfer->other_size, " bytes, expected ", transfer->size));
  }
  throw Error(transfer->error);
}

void SocketCollective::end_sends() {
  while (!sends_.empty()) {
    end(sends_.front());
    sends_.pop_front();
  }
}

// --------------------------------------------------------------- collectives

void SocketCollective::barrier() {
  const at::Tensor nothing = at::empty({0}, at::TensorOptions(at::kByte));
  for (int distance = 1; distance < size_; distance *= 2) {
    send((rank_ + distance) % size_, nothing);
    receive((rank_ + size_ - distance) % size_, nothing);
  }
  end_sends();
}

void SocketCollective::all_reduce(const at::Tensor& tensor, ReduceOp op) {
  const auto num_bytes = static_cast<int64_t>(tensor.nbytes());
  if (num_bytes > kTinyBytes && num_bytes * size_ > kReduceByGatherBytes) {
    return reduce_in_ring(tensor, op);
  }
  const at::Tensor all = at::empty({size_ * tensor.numel()},
                                   tensor.options().requires_grad(false));
  gather_in_steps(all, tensor);
  const at::Tensor parts = all.view({size_, tensor.numel()});
  // The sum is in the order of the ranks, so that all get the same bits.
  at::Tensor sum = tensor;
  sum.copy_(parts[0]);
  for (int i = 1; i < size_; ++i) reduce_into(sum, parts[i], op);
}

// Sends each chunk round twice: once to sum it, once to share the sum. Sends a
// piece on as soon as it is there.
void SocketCollective::reduce_in_ring(const at::Tensor& tensor, ReduceOp op) {
  struct PieceToReceive {
    at::Tensor to;
    at::Tensor sum;  // undefined: it is complete
    bool is_sent_on = true;
    TransferPtr transfer;
  };
  std::deque<PieceToReceive> pending;  // in the order in which they are sent
  for (int step = 0; step < size_ - 1; ++step) {
    for (at::Tensor& piece :
         pieces_of(tensor, (rank_ + 2 * size_ - step - 1) % size_, size_)) {
      pending.push_back({{}, std::move(piece), true, nullptr});
    }
  }
  for (int step = 0; step < size_ - 1; ++step) {
    for (at::Tensor& piece :
         pieces_of(tensor, (rank_ + 2 * size_ - step) % size_, size_)) {
      pending.push_back({std::move(piece), {}, step < size_ - 2, nullptr});
    }
  }
  size_t num_posted = 0;
  auto post_ahead = [&] {
    while (num_posted < std::min(kAhead, pending.size())) {
      PieceToReceive& piece = pending[num_posted++];
      if (piece.sum.defined()) piece.to = at::empty_like(piece.sum);
      piece.transfer = begin_receive(previous(), piece.to);
    }
  };
  post_ahead();
  for (const at::Tensor& piece : pieces_of(tensor, rank_, size_)) {
    send(next(), piece);
  }
  while (!pending.empty()) {
    const PieceToReceive piece = std::move(pending.front());
    pending.pop_front();
    --num_posted;
    end(piece.transfer);
    post_ahead();
    if (piece.sum.defined()) reduce_into(piece.sum, piece.to, op);
    if (piece.is_sent_on)
      send(next(), piece.sum.defined() ? piece.sum : piece.to);
  }
  end_sends();
}

// Broadcasts in a tree whose edges lead to ranks a power of two further on.
void SocketCollective::broadcast(const at::Tensor& tensor, int root) {
  const int place = (rank_ + size_ - root) % size_;
  const std::vector<at::Tensor> pieces = pieces_of(tensor, 0, 1);
  int lowest = 1;  // distance of the nearest child
  while (lowest <= place) lowest *= 2;
  std::vector<int> children;
  for (int distance = lowest; place + distance < size_; distance *= 2) {
    children.push_back((rank_ + distance) % size_);
  }
  // The farthest child has the most below it.
  std::reverse(children.begin(), children.end());
  const int parent = (rank_ + size_ - lowest / 2) % size_;
  std::vector<TransferPtr> pending;
  if (place > 0) {
    for (const at::Tensor& piece : pieces) {
      pending.push_back(begin_receive(parent, piece));
    }
  }
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (place > 0) end(pending[i]);
    for (const int child : children) send(child, pieces[i]);
  }
  end_sends();
  if (static_cast<int64_t>(tensor.nbytes()) <= kUnacknowledgedBytes) return;
  const at::Tensor nothing = at::empty({0}, at::TensorOptions(at::kByte));
  for (const int child : children) receive(child, nothing);
  if (place > 0) send(parent, nothing);
  end_sends();
}

void SocketCollective::all_gather(const at::Tensor& output,
                                  const at::Tensor& input) {
  const auto part = static_cast<int64_t>(input.nbytes());
  if (part <= kShortPartBytes || part * size_ <= kGatherInStepsBytes) {
    return gather_in_steps(output, input);
  }
  gather_in_ring(output, input);
}

// Gathers in steps that double the parts of a rank: Bruck et al., 1997.
void SocketCollective::gather_in_steps(const at::Tensor& output,
                                       const at::Tensor& input) {
  const int64_t numel = input.numel();
  // Part i belongs to the rank i places back.
  const at::Tensor parts =
      at::empty({size_ * numel}, input.options().requires_grad(false));
  parts.narrow(0, 0, numel).copy_(input);
  for (int distance = 1; distance < size_; distance *= 2) {
    const int64_t count = std::min(distance, size_ - distance) * numel;
    const TransferPtr pending =
        begin_receive((rank_ + size_ - distance) % size_,
                      parts.narrow(0, distance * numel, count));
    send((rank_ + distance) % size_, parts.narrow(0, 0, count));
    end(pending);
  }
  end_sends();
  for (int i = 0; i < size_; ++i) {
    const int from = (rank_ + size_ - i) % size_;
    output.narrow(0, from * numel, numel)
        .copy_(parts.narrow(0, i * numel, numel));
  }
}

void SocketCollective::gather_in_ring(const at::Tensor& output,
                                      const at::Tensor& input) {
  const int64_t numel = input.numel();
  at::Tensor own = output.narrow(0, rank_ * numel, numel);
  own.copy_(input);
  for (const at::Tensor& piece : pieces_of(own, 0, 1)) send(next(), piece);
  std::deque<std::pair<at::Tensor, bool>> pending;  // and whether it is sent on
  for (int step = 0; step < size_ - 1; ++step) {
    const int from = (rank_ + 2 * size_ - step - 1) % size_;
    for (at::Tensor& piece :
         pieces_of(output.narrow(0, from * numel, numel), 0, 1)) {
      pending.emplace_back(std::move(piece), step < size_ - 2);
    }
  }
  std::deque<TransferPtr> posted;
  size_t num_posted = 0;
  for (size_t i = 0; i < pending.size(); ++i) {
    while (num_posted < std::min(i + kAhead, pending.size())) {
      posted.push_back(begin_receive(previous(), pending[num_posted++].first));
    }
    end(posted.front());
    posted.pop_front();
    if (pending[i].second) send(next(), pending[i].first);
  }
  end_sends();
}

void SocketCollective::reduce_scatter(const at::Tensor& output,
                                      const at::Tensor& input, ReduceOp op) {
  struct PieceToReceive {
    at::Tensor own;  // of the input
    at::Tensor sum;
    TransferPtr transfer;
  };
  std::deque<PieceToReceive> pending;
  const auto chunk = [&](int step) {
    return pieces_of(input, (rank_ + 2 * size_ - 2 - step) % size_, size_);
  };
  const std::vector<at::Tensor> results = pieces_of(output, 0, 1);
  for (int step = 0; step < size_ - 1; ++step) {
    const std::vector<at::Tensor> pieces = chunk(step);
    for (size_t i = 0; i < pieces.size(); ++i) {
      const bool is_last = step == size_ - 2;
      pending.push_back({pieces[i], is_last ? results[i] : at::Tensor(), {}});
    }
  }
  size_t num_posted = 0;
  auto post_ahead = [&] {
    while (num_posted < std::min(kAhead, pending.size())) {
      PieceToReceive& piece = pending[num_posted++];
      if (!piece.sum.defined()) {
        piece.sum =
            at::empty_like(piece.own, piece.own.options().requires_grad(false));
      }
      piece.transfer = begin_receive(previous(), piece.sum);
    }
  };
  post_ahead();
  for (const at::Tensor& piece : chunk(-1)) send(next(), piece);
  const size_t num_results = results.size();
  while (!pending.empty()) {
    const bool is_result = pending.size() <= num_results;
    const PieceToReceive piece = std::move(pending.front());
    pending.pop_front();
    --num_posted;
    end(piece.transfer);
    post_ahead();
    reduce_into(piece.sum, piece.own, op);
    if (!is_result) send(next(), piece.sum);
  }
  end_sends();
}

void SocketCollective::all_to_all(const at::Tensor& output,
                                  const at::Tensor& input,
                                  const Counts& output_counts,
                                  const Counts& input_counts) {
  std::vector<at::Tensor> to(size_);
  std::vector<at::Tensor> from(size_);
  int64_t to_begin = 0;
  int64_t from_begin = 0;
  for (int i = 0; i < size_; ++i) {
    to[i] = output.narrow(0, to_begin, output_counts[i]);
    from[i] = input.narrow(0, from_begin, input_counts[i]);
    to_begin += output_counts[i];
    from_begin += input_counts[i];
  }
  std::vector<TransferPtr> pending;
  for (int step = 1; step < size_; ++step) {
    const int src = (rank_ + size_ - step) % size_;
    pending.push_back(begin_receive(src, to[src]));
  }
  for (int step = 1; step < size_; ++step) {
    const int dst = (rank_ + step) % size_;
    send(dst, from[dst]);
  }
  to[rank_].copy_(from[rank_]);
  for (const TransferPtr& one : pending) end(one);
  end_sends();
}

}  // namespace smp::comm
