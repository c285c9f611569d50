#include "csrc/tensor_parallel/group.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "csrc/comm/communicator_checks.h"
#include "csrc/common/check.h"
#include "csrc/tensor_parallel/pieces.h"

namespace smp::tensor_parallel {
namespace {

thread_local bool is_alone_here = false;

int64_t wrapped(int64_t dim, const at::Tensor& x, const char* what) {
  SMP_CHECK_VALUE(dim >= -x.dim() && dim < x.dim(), what, ": dim ", dim,
                  " does not exist in a tensor of shape ", x.sizes());
  return dim < 0 ? dim + x.dim() : dim;
}

int64_t sum(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

int64_t begin_of(const Sizes& sizes, int group_rank) {
  return std::accumulate(sizes.begin(), sizes.begin() + group_rank, int64_t{0});
}

int64_t largest(const Sizes& sizes) {
  return *std::max_element(sizes.begin(), sizes.end());
}

bool all_equal(const Sizes& sizes) {
  return std::equal(sizes.begin() + 1, sizes.end(), sizes.begin());
}

std::vector<int64_t> shape_with(const at::Tensor& x, int64_t dim,
                                int64_t size) {
  std::vector<int64_t> shape = x.sizes().vec();
  shape[dim] = size;
  return shape;
}

std::vector<int64_t> with_front(int64_t size, at::IntArrayRef shape) {
  std::vector<int64_t> result{size};
  result.insert(result.end(), shape.begin(), shape.end());
  return result;
}

// Returns whether parts along this dim lie one after the other in a contiguous
// tensor.
bool leads(const at::Tensor& x, int64_t dim) {
  const at::IntArrayRef shape = x.sizes();
  return std::all_of(shape.begin(), shape.begin() + dim,
                     [](int64_t size) { return size == 1; });
}

// Repeats a part as if all ranks held the same part as this one.
at::Tensor repeated(const at::Tensor& x, int64_t dim, int64_t total) {
  if (x.size(dim) == total) return x;
  if (x.size(dim) == 0) return x.new_zeros(shape_with(x, dim, total));
  std::vector<int64_t> times(static_cast<size_t>(x.dim()), 1);
  times[dim] = (total + x.size(dim) - 1) / x.size(dim);
  return x.repeat(times).narrow(dim, 0, total);
}

at::Tensor to_tensor(const std::vector<int64_t>& numbers) {
  at::Tensor tensor =
      at::empty({static_cast<int64_t>(numbers.size())}, at::kLong);
  std::copy(numbers.begin(), numbers.end(), tensor.mutable_data_ptr<int64_t>());
  return tensor;
}

// Packs the parts into a block of each rank, padded to one shape: [t, ...].
at::Tensor packed(const at::Tensor& x, int64_t dim, const Sizes& sizes,
                  std::vector<int64_t> block_shape) {
  if (all_equal(sizes) && leads(x, dim) &&
      std::equal(block_shape.begin(), block_shape.end(),
                 shape_with(x, dim, sizes[0]).begin())) {
    return x.contiguous();
  }
  const auto num_ranks = static_cast<int64_t>(sizes.size());
  const auto shape = with_front(num_ranks, block_shape);
  const bool has_gaps =
      block_shape != shape_with(x, dim, sizes[0]) || !all_equal(sizes);
  at::Tensor blocks = has_gaps ? x.new_zeros(shape) : x.new_empty(shape);
  int64_t begin = 0;
  for (int64_t i = 0; i < num_ranks; ++i) {
    at::Tensor block = blocks.select(0, i);
    for (int64_t d = 0; d < x.dim(); ++d) {
      block = block.narrow(d, 0, d == dim ? sizes[i] : x.size(d));
    }
    block.copy_(x.narrow(dim, begin, sizes[i]));
    begin += sizes[i];
  }
  return blocks;
}

// Inverts `packed`: puts parts of the blocks side by side along `dim`.
at::Tensor unpacked(const at::Tensor& blocks, int64_t dim, const Sizes& sizes) {
  const at::Tensor first = blocks.select(0, 0);
  if (all_equal(sizes) && leads(first, dim)) {
    return blocks.reshape(shape_with(first, dim, sum(sizes)));
  }
  std::vector<at::Tensor> parts;
  parts.reserve(sizes.size());
  for (size_t i = 0; i < sizes.size(); ++i) {
    parts.push_back(
        blocks.select(0, static_cast<int64_t>(i)).narrow(dim, 0, sizes[i]));
  }
  return at::cat(parts, dim);
}

}  // namespace

bool set_alone(bool is_alone) { return std::exchange(is_alone_here, is_alone); }

bool alone() { return is_alone_here; }

bool has_no_data(const at::Tensor& x) {
  if (x.is_meta()) return true;
  // Fake tensors lie upon storage of the meta device, whatever their device
  // says.
  return x.key_set().has(c10::DispatchKey::Python) && x.has_storage() &&
         x.storage().device().is_meta();
}

at::Tensor with_data(const at::Tensor& x) {
  if (!x.defined() || !x.key_set().has(c10::DispatchKey::Python) ||
      has_no_data(x)) {
    return x;
  }
  return at::empty(x.sizes(), x.options()).copy_(x);
}

std::vector<at::Tensor> with_data(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  result.reserve(tensors.size());
  for (const at::Tensor& one : tensors) result.push_back(with_data(one));
  return result;
}

Pending::Pending(at::Tensor ready) : ready_(std::move(ready)) {}

Pending::Pending(const Group& group, const Header& header, comm::WorkPtr work,
                 Finish finish)
    : group_(&group),
      header_(header),
      work_(std::move(work)),
      finish_(std::move(finish)) {}

at::Tensor Pending::take() {
  if (group_ == nullptr) return std::move(ready_);
  SMP_ASSERT(work_, header_.what.data(), " was taken twice");
  group_->finish(*work_, *group_->communicator_, header_);
  work_.reset();
  return finish_();
}

Group::Group(comm::CommunicatorPtr communicator, comm::CommunicatorPtr control,
             int group_rank, int size, comm::WaitOptions wait)
    : communicator_(std::move(communicator)),
      control_(std::move(control)),
      group_rank_(group_rank),
      size_(size),
      wait_(std::move(wait)) {
  SMP_CHECK_VALUE(size >= 1 && group_rank >= 0 && group_rank < size,
                  "expected a group rank in [0, ", size, "), got ", group_rank);
  SMP_CHECK_VALUE(!communicator_ || (communicator_->size() == size &&
                                     communicator_->group_rank() == group_rank),
                  "the communicator is of another group");
}

Sizes Group::even_or(const Sizes& sizes, int64_t extent,
                     const char* what) const {
  if (!sizes.empty()) {
    SMP_CHECK_VALUE(static_cast<int>(sizes.size()) == size_ &&
                        std::none_of(sizes.begin(), sizes.end(),
                                     [](int64_t n) { return n < 0; }) &&
                        sum(sizes) == extent,
                    what, ": expected ", size_, " sizes with the sum ", extent,
                    ", got ", at::IntArrayRef(sizes));
    return sizes;
  }
  SMP_CHECK_VALUE(extent % size_ == 0, what, ": ", extent,
                  " cannot be split evenly over ", size_,
                  " ranks; pass the size of each part");
  return Sizes(static_cast<size_t>(size_), extent / size_);
}

bool Group::is_alone(const at::Tensor& tensor) const {
  if (size_ == 1 || alone() || has_no_data(tensor)) return true;
  SMP_CHECK(communicator_, "this tensor-parallel group of ", size_,
            " has no communicator");
  return false;
}

comm::Communicator& Group::control() const {
  return control_ ? *control_ : *communicator_;
}

template <typename Start>
comm::WorkPtr Group::issue(comm::Communicator& on, const Header& header,
                           int64_t num_bytes, Start&& start) {
  if (!on.stamp_next(header.hash())) compare(header);
  num_calls_ += 1;
  bytes_sent_ += num_bytes;
  return start(on);
}

void Group::finish(comm::Work& work, const comm::Communicator& on,
                   const Header& header) const {
  try {
    comm::follow(work, wait_, on, header.what.data());
  } catch (const comm::Disagreement&) {
    raise_disagreement(header);
  }
}

std::vector<at::Tensor> Group::gather_headers(const at::Tensor& own,
                                              const char* what) const {
  comm::Communicator& on = control();
  const at::Tensor all = at::empty({size_, own.numel()}, own.options());
  comm::wait_for(*on.all_gather(all, own), wait_, on, what);
  return all.unbind(0);
}

void Group::compare(const Header& header) const {
  const at::Tensor own = at::empty({1}, at::kLong);
  *own.mutable_data_ptr<int64_t>() = static_cast<int64_t>(header.hash());
  for (const at::Tensor& one : gather_headers(own, header.what.data())) {
    if (*one.const_data_ptr<int64_t>() != *own.const_data_ptr<int64_t>()) {
      raise_disagreement(header);
    }
  }
}

void Group::raise_disagreement(const Header& header) const {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(Header));
  const at::Tensor own = at::empty({kBytes}, at::kByte);
  std::memcpy(own.mutable_data_ptr(), &header, sizeof(Header));
  std::string text;
  int group_rank = 0;
  for (const at::Tensor& one : gather_headers(own, header.what.data())) {
    Header theirs;
    std::memcpy(&theirs, one.const_data_ptr(), sizeof(Header));
    text += detail::concat(text.empty() ? "" : ", ", "group rank ",
                           group_rank++, ": ", theirs.describe());
  }
  SMP_CHECK_VALUE(
      false, "the ranks of ", communicator_->name(),
      " disagree in a split layer (", text,
      "); they compute on each other's samples: pad batches and sequences to "
      "one length on all ranks of a tensor-parallel group, and run the same "
      "modules on each");
}

Pending Group::begin_all_reduce(const at::Tensor& x, comm::ReduceOp op,
                                const char* what, bool may_overwrite) {
  may_overwrite = may_overwrite && x.is_contiguous();
  if (is_alone(x)) return Pending(may_overwrite ? x : x.clone());
  at::Tensor result = may_overwrite
                          ? x.detach()
                          : x.detach().clone(at::MemoryFormat::Contiguous);
  const Header header = Header::of(what, x, x.sizes());
  const auto num_bytes = static_cast<int64_t>(x.nbytes());
  comm::WorkPtr work =
      issue(*communicator_, header, 2 * num_bytes * (size_ - 1) / size_,
            [&](auto& on) { return on.all_reduce(result, op); });
  return {*this, header, std::move(work), [result] { return result; }};
}

Pending Group::begin_all_gather(const at::Tensor& x, int64_t dim,
                                const Sizes& given, const char* what) {
  dim = wrapped(dim, x, what);
  const int64_t own = x.size(dim);
  const int64_t total = given.empty() ? own * size_ : sum(given);
  const Sizes sizes = even_or(given, total, what);
  SMP_CHECK_VALUE(own == sizes[group_rank_], what, ": expected a part of size ",
                  sizes[group_rank_], " along dim ", dim, ", got shape ",
                  x.sizes());
  if (is_alone(x)) return Pending(repeated(x, dim, total));
  at::Tensor part = x.detach().contiguous();
  if (largest(sizes) > own) {
    at::Tensor padded = part.new_zeros(shape_with(x, dim, largest(sizes)));
    padded.narrow(dim, 0, own).copy_(part);
    part = padded;
  }
  at::Tensor blocks = part.new_empty(with_front(size_, part.sizes()));
  const Header header =
      Header::of(what, x,
                 given.empty() ? x.sizes().vec() : shape_with(x, dim, total),
                 dim)
          .add(given);
  comm::WorkPtr work = issue(
      *communicator_, header, static_cast<int64_t>(x.nbytes()) * (size_ - 1),
      [&](auto& on) { return on.all_gather(blocks, part); });
  return {*this, header, std::move(work),
          [=] { return unpacked(blocks, dim, sizes); }};
}

Pending Group::begin_reduce_scatter(const at::Tensor& x, int64_t dim,
                                    const Sizes& given, const char* what) {
  dim = wrapped(dim, x, what);
  const Sizes sizes = even_or(given, x.size(dim), what);
  if (is_alone(x)) return Pending(own_part(x, dim, sizes, what).clone());
  const auto block_shape = shape_with(x, dim, largest(sizes));
  const at::Tensor blocks = packed(x.detach(), dim, sizes, block_shape);
  at::Tensor part = x.new_empty(block_shape);
  const Header header = Header::of(what, x, x.sizes(), dim).add(given);
  comm::WorkPtr work = issue(
      *communicator_, header,
      static_cast<int64_t>(x.nbytes()) / size_ * (size_ - 1), [&](auto& on) {
        return on.reduce_scatter(part, blocks, comm::ReduceOp::kSum);
      });
  const int64_t own = sizes[group_rank_];
  return {*this, header, std::move(work),
          [=] { return part.narrow(dim, 0, own).contiguous(); }};
}

Pending Group::begin_gather_into(const at::Tensor& blocks,
                                 const at::Tensor& part, const char* what) {
  if (is_alone(part)) {
    blocks.copy_(part.expand_as(blocks));
    return Pending(blocks);
  }
  const at::Tensor input = part.detach();
  const Header header = Header::of(what, part, part.sizes());
  comm::WorkPtr work = issue(
      *communicator_, header, static_cast<int64_t>(part.nbytes()) * (size_ - 1),
      [&](auto& on) { return on.all_gather(blocks, input); });
  return {*this, header, std::move(work), [blocks] { return blocks; }};
}

Pending Group::begin_scatter_into(const at::Tensor& part,
                                  const at::Tensor& blocks, const char* what) {
  if (is_alone(blocks)) {
    part.copy_(blocks[group_rank_]);
    return Pending(part);
  }
  const at::Tensor input = blocks.detach();
  const Header header = Header::of(what, blocks, blocks.sizes());
  comm::WorkPtr work =
      issue(*communicator_, header,
            static_cast<int64_t>(blocks.nbytes()) / size_ * (size_ - 1),
            [&](auto& on) {
              return on.reduce_scatter(part, input, comm::ReduceOp::kSum);
            });
  return {*this, header, std::move(work), [part] { return part; }};
}

int64_t Group::num_pieces(const at::Tensor& part, int64_t extent) const {
  if (is_alone(part) || !communicator_->is_stream_ordered()) return 1;
  const auto num_bytes = static_cast<int64_t>(part.nbytes()) * size_;
  return tensor_parallel::num_pieces(num_bytes, extent);
}

Pending Group::begin_exchange(const at::Tensor& x, int64_t split_dim,
                              int64_t concat_dim, const Sizes& given_split,
                              const Sizes& given_concat, const char* what) {
  split_dim = wrapped(split_dim, x, what);
  concat_dim = wrapped(concat_dim, x, what);
  SMP_CHECK_VALUE(split_dim != concat_dim, what,
                  ": expected two dims, got dim ", split_dim, " twice");
  const Sizes split = even_or(given_split, x.size(split_dim), what);
  const int64_t own = x.size(concat_dim);
  const int64_t total = given_concat.empty() ? own * size_ : sum(given_concat);
  const Sizes concat = even_or(given_concat, total, what);
  SMP_CHECK_VALUE(own == concat[group_rank_], what,
                  ": expected a part of size ", concat[group_rank_],
                  " along dim ", concat_dim, ", got shape ", x.sizes());
  if (is_alone(x)) {
    return Pending(
        repeated(own_part(x, split_dim, split, what), concat_dim, total));
  }
  auto block_shape = shape_with(x, split_dim, largest(split));
  block_shape[concat_dim] = largest(concat);
  const at::Tensor from = packed(x.detach(), split_dim, split, block_shape);
  at::Tensor to = x.new_empty(with_front(size_, block_shape));
  const Header header =
      Header::of(what, x,
                 given_concat.empty() ? x.sizes().vec()
                                      : shape_with(x, concat_dim, total),
                 split_dim, concat_dim)
          .add(given_split)
          .add(given_concat);
  comm::WorkPtr work =
      issue(*communicator_, header,
            static_cast<int64_t>(x.nbytes()) / size_ * (size_ - 1),
            [&](auto& on) { return on.all_to_all(to, from); });
  const int64_t own_split = split[group_rank_];
  return {*this, header, std::move(work), [=] {
            return unpacked(to.narrow(split_dim + 1, 0, own_split), concat_dim,
                            concat);
          }};
}

void Group::compare(const Header& header, const Sizes& sent,
                    const Sizes& received) const {
  std::vector<int64_t> own{static_cast<int64_t>(header.hash())};
  own.insert(own.end(), sent.begin(), sent.end());
  own.insert(own.end(), received.begin(), received.end());
  std::vector<Sizes> all_sent;
  std::vector<Sizes> all_received;
  for (const at::Tensor& one :
       gather_headers(to_tensor(own), header.what.data())) {
    const auto* numbers = one.const_data_ptr<int64_t>();
    if (numbers[0] != own[0]) raise_disagreement(header);
    all_sent.emplace_back(numbers + 1, numbers + 1 + size_);
    all_received.emplace_back(numbers + 1 + size_, numbers + 1 + 2 * size_);
  }
  const std::string text = comm::count_disagreement(all_sent, all_received);
  SMP_CHECK_VALUE(text.empty(), header.what.data(), ": the ranks of ",
                  communicator_->name(), " disagree; ", text);
}

Pending Group::begin_row_exchange(const at::Tensor& x, const Sizes& sent,
                                  const Sizes& received, const char* what) {
  SMP_CHECK_VALUE(x.dim() >= 1, what, ": expected rows, got a scalar");
  const auto num_ranks = static_cast<size_t>(size_);
  SMP_CHECK_VALUE(sent.size() == num_ranks && received.size() == num_ranks,
                  what, ": expected the rows of ", size_, " ranks, got ",
                  at::IntArrayRef(sent), " and ", at::IntArrayRef(received));
  even_or(sent, x.size(0), what);
  even_or(received, sum(received), what);
  if (is_alone(x)) return Pending(repeated(x, 0, sum(received)));
  const at::Tensor from = x.detach().contiguous();
  at::Tensor to = from.new_empty(shape_with(x, 0, sum(received)));
  int64_t row = 1;
  for (int64_t dim = 1; dim < x.dim(); ++dim) row *= x.size(dim);
  const auto in_elements = [&](Sizes counts) {
    for (int64_t& count : counts) count *= row;
    return counts;
  };
  const Sizes to_counts = in_elements(received);
  const Sizes from_counts = in_elements(sent);
  const Header header = Header::of(what, x, x.sizes().slice(1), 0);
  comm::Communicator& on = *communicator_;
  if (!on.stamp_next(header.hash())) compare(header, from_counts, to_counts);
  num_calls_ += 1;
  bytes_sent_ += (from.numel() - from_counts[group_rank_]) *
                 static_cast<int64_t>(from.element_size());
  return {*this, header, on.all_to_all_v(to, from, to_counts, from_counts),
          [to, from] { return to; }};
}

Sizes Group::exchange_counts(const Sizes& sent, const Header& header) {
  const auto each = static_cast<int64_t>(sent.size()) / size_;
  SMP_ASSERT(each * size_ == static_cast<int64_t>(sent.size()), "counts");
  if (size_ == 1) return sent;
  std::vector<int64_t> own{static_cast<int64_t>(header.hash())};
  own.insert(own.end(), sent.begin(), sent.end());
  const at::Tensor mine = to_tensor(own);
  const at::Tensor all = at::empty({size_, mine.numel()}, mine.options());
  comm::Communicator& on = control();
  num_calls_ += 1;
  bytes_sent_ += static_cast<int64_t>(mine.nbytes()) * (size_ - 1);
  finish(*on.all_gather(all, mine), on, header);
  Sizes result;
  for (int rank = 0; rank < size_; ++rank) {
    const auto* numbers = all.const_data_ptr<int64_t>() + rank * mine.numel();
    if (numbers[0] != own[0]) raise_disagreement(header);
    const auto* for_this = numbers + 1 + group_rank_ * each;
    result.insert(result.end(), for_this, for_this + each);
  }
  return result;
}

at::Tensor Group::own_part(const at::Tensor& x, int64_t dim, const Sizes& given,
                           const char* what) const {
  dim = wrapped(dim, x, what);
  const Sizes sizes = even_or(given, x.size(dim), what);
  return x.narrow(dim, begin_of(sizes, group_rank_), sizes[group_rank_]);
}

int64_t Group::broadcast_from_first(int64_t value, const char* what) {
  if (size_ == 1 || alone()) return value;
  const at::Tensor tensor = at::empty({1}, at::kLong);
  *tensor.mutable_data_ptr<int64_t>() = value;
  const Header header = Header::of(what);
  const comm::WorkPtr work =
      issue(control(), header, group_rank_ == 0 ? 8 * (size_ - 1) : 0,
            [&](auto& on) { return on.broadcast(tensor, 0); });
  finish(*work, control(), header);
  return *tensor.const_data_ptr<int64_t>();
}

bool Group::all_say(bool says, const char* what) {
  if (size_ == 1 || alone()) return says;
  const at::Tensor tensor = at::empty({1}, at::kLong);
  *tensor.mutable_data_ptr<int64_t>() = says ? 1 : 0;
  const Header header = Header::of(what);
  const comm::WorkPtr work = issue(
      control(), header, 2 * 8 * (size_ - 1) / size_,
      [&](auto& on) { return on.all_reduce(tensor, comm::ReduceOp::kMin); });
  finish(*work, control(), header);
  return *tensor.const_data_ptr<int64_t>() != 0;
}

}  // namespace smp::tensor_parallel
