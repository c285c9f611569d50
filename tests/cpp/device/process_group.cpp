#include "tests/cpp/device/process_group.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "tests/cpp/device/streams.h"
#include "tests/cpp/device/twins.h"

namespace smp::late {
namespace {

using c10d::OpType;
using Tensors = std::vector<at::Tensor>;
using Lists = std::vector<Tensors>;
using GlooWork = c10::intrusive_ptr<c10d::Work>;

// Tensors of one operation, kept until it is waited for or over.
class Shelf {
 public:
  void add(const at::Tensor& tensor) { tensors_.push_back(tensor); }
  void clear() {
    Tensors dropped;
    const std::lock_guard lock(mutex_);
    dropped.swap(tensors_);
  }

 private:
  std::mutex mutex_;
  Tensors tensors_;
};

// How an operation ended, written on its stream.
struct End {
  MarkPtr mark;
  std::exception_ptr error;  // readable once the mark has fired
};

class LateWork final : public c10d::Work {
 public:
  LateWork(int rank, OpType type, c10::Stream stream, std::shared_ptr<End> end,
           std::shared_ptr<Shelf> shelf, Tensors outputs)
      : Work(rank, type),
        stream_(stream),
        end_(std::move(end)),
        shelf_(std::move(shelf)),
        outputs_(std::move(outputs)),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()),
            std::vector<c10::Device>{stream.device()})) {
    const c10::StreamGuard guard(stream_);
    future_->markCompleted(c10::IValue(outputs_));
  }

  bool isCompleted() override { return end_->mark->is_fired(); }
  bool isSuccess() const override {
    return end_->mark->is_fired() && !end_->error;
  }
  std::exception_ptr exception() const override {
    return end_->mark->is_fired() ? end_->error : nullptr;
  }
  std::vector<at::Tensor> result() override { return outputs_; }
  void synchronize() override {
    wait_for(current_stream(stream_.device_index()), end_->mark);
    shelf_->clear();
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    if (opType_ == OpType::BARRIER) drain_mark(end_->mark);
    return true;
  }
  void blockCurrentStream() override { synchronize(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

 private:
  const c10::Stream stream_;
  const std::shared_ptr<End> end_;
  const std::shared_ptr<Shelf> shelf_;
  const Tensors outputs_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// What an operation has to do with Gloo, shared with the threads of streams.
class Gloo {
 public:
  explicit Gloo(c10::intrusive_ptr<c10d::Backend> backend)
      : backend_(std::move(backend)) {}

  c10d::Backend& backend() const { return *backend_; }

  // Waits for a collective, by looking, since Gloo ends none.
  void wait(const GlooWork& work) const {
    while (!work->isCompleted()) {
      TORCH_CHECK(!is_aborted_, "late device: the process group was aborted");
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    work->wait();
  }

  // Waits for a message, which `abort` ends.
  void wait_for_message(const GlooWork& work) {
    {
      const std::lock_guard lock(mutex_);
      TORCH_CHECK(!is_aborted_, "late device: the process group was aborted");
      messages_.push_back(work);
    }
    const bool has_come = work->wait();
    const std::lock_guard lock(mutex_);
    messages_.remove(work);
    TORCH_CHECK(has_come, "late device: the process group was aborted");
  }

  void abort() {
    const std::lock_guard lock(mutex_);
    is_aborted_ = true;
    for (const GlooWork& work : messages_) work->abort();
  }

 private:
  const c10::intrusive_ptr<c10d::Backend> backend_;
  std::atomic<bool> is_aborted_ = false;
  std::mutex mutex_;
  std::list<GlooWork> messages_;
};

// One operation: the tensors of the device, and what the stream does.
struct Operation {
  OpType type;
  bool is_async = true;
  int peer = -1;  // of a message
  Tensors inputs;
  Tensors outputs;
  std::function<void(Gloo&)> run;
};

Tensors twins_of(Twins& twins, const Tensors& tensors) {
  Tensors result;
  for (const at::Tensor& tensor : tensors) result.push_back(twins.of(tensor));
  return result;
}

Lists twins_of(Twins& twins, const Lists& lists) {
  Lists result;
  for (const Tensors& list : lists) result.push_back(twins_of(twins, list));
  return result;
}

Tensors joined(const Lists& lists) {
  Tensors all;
  for (const Tensors& list : lists) {
    all.insert(all.end(), list.begin(), list.end());
  }
  return all;
}

// Gloo has no mean.
template <typename Options>
bool take_mean(Options& options) {
  const bool is_mean = options.reduceOp == c10d::ReduceOp::AVG;
  if (is_mean) options.reduceOp = c10d::ReduceOp::SUM;
  return is_mean;
}

void divide(const Tensors& tensors, int size) {
  const at::NoGradGuard no_grad;
  for (at::Tensor tensor : tensors) tensor.div_(size);
}

class Group final : public c10d::Backend {
 public:
  explicit Group(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()),
        gloo_(std::make_shared<Gloo>(std::move(gloo))) {}

  const std::string getBackendName() const override { return "late"; }
  void abort() override { gloo_->abort(); }
  void shutdown() override {}
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return num_issued_; }

  c10::intrusive_ptr<c10d::Work> broadcast(
      Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return start({OpType::BROADCAST,
                  options.asyncOp,
                  -1,
                  {},
                  tensors,
                  [options, all = twins(tensors)](Gloo& gloo) mutable {
                    gloo.wait(gloo.backend().broadcast(all, options));
                  }});
  }

  c10::intrusive_ptr<c10d::Work> allreduce(
      Tensors& tensors, const c10d::AllreduceOptions& given) override {
    c10d::AllreduceOptions options = given;
    const bool is_mean = take_mean(options);
    return start({OpType::ALLREDUCE,
                  given.asyncOp,
                  -1,
                  {},
                  tensors,
                  [options, is_mean, size = getSize(),
                   all = twins(tensors)](Gloo& gloo) mutable {
                    gloo.wait(gloo.backend().allreduce(all, options));
                    if (is_mean) divide(all, size);
                  }});
  }

  c10::intrusive_ptr<c10d::Work> reduce(
      Tensors& tensors, const c10d::ReduceOptions& given) override {
    c10d::ReduceOptions options = given;
    const bool is_mean = take_mean(options) && given.rootRank == getRank();
    return start({OpType::REDUCE,
                  given.asyncOp,
                  -1,
                  {},
                  tensors,
                  [options, is_mean, size = getSize(),
                   all = twins(tensors)](Gloo& gloo) mutable {
                    gloo.wait(gloo.backend().reduce(all, options));
                    if (is_mean) divide(all, size);
                  }});
  }

  c10::intrusive_ptr<c10d::Work> allgather(
      Lists& outputs, Tensors& inputs,
      const c10d::AllgatherOptions& options) override {
    return start({OpType::ALLGATHER, options.asyncOp, -1, inputs,
                  joined(outputs),
                  [options, to = twins(outputs),
                   from = twins(inputs)](Gloo& gloo) mutable {
                    gloo.wait(gloo.backend().allgather(to, from, options));
                  }});
  }

  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::AllgatherOptions& options) override {
    return start(
        {OpType::_ALLGATHER_BASE,
         options.asyncOp,
         -1,
         {input},
         {output},
         [options, to = twin(output), from = twin(input)](Gloo& gloo) mutable {
           gloo.wait(gloo.backend()._allgather_base(to, from, options));
         }});
  }

  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::ReduceScatterOptions& given) override {
    c10d::AllreduceOptions options;
    options.reduceOp = given.reduceOp;
    const bool is_mean = take_mean(options);
    return start({OpType::_REDUCE_SCATTER_BASE,
                  given.asyncOp,
                  -1,
                  {input},
                  {output},
                  [options, is_mean, rank = getRank(), size = getSize(),
                   to = twin(output), from = twin(input)](Gloo& gloo) {
                    // A copy, since the input is left alone; a sum of all of
                    // it, since the work of Gloo's own says only to a wait that
                    // it is over.
                    std::vector<at::Tensor> sum = {from.flatten().clone()};
                    gloo.wait(gloo.backend().allreduce(sum, options));
                    to.copy_(sum[0].chunk(size).at(rank).view_as(to));
                    if (is_mean) divide({to}, size);
                  }});
  }

  c10::intrusive_ptr<c10d::Work> gather(
      Lists& outputs, Tensors& inputs,
      const c10d::GatherOptions& options) override {
    return start({OpType::GATHER, options.asyncOp, -1, inputs, joined(outputs),
                  [options, to = twins(outputs),
                   from = twins(inputs)](Gloo& gloo) mutable {
                    gloo.wait(gloo.backend().gather(to, from, options));
                  }});
  }

  c10::intrusive_ptr<c10d::Work> scatter(
      Tensors& outputs, Lists& inputs,
      const c10d::ScatterOptions& options) override {
    return start({OpType::SCATTER, options.asyncOp, -1, joined(inputs), outputs,
                  [options, to = twins(outputs),
                   from = twins(inputs)](Gloo& gloo) mutable {
                    gloo.wait(gloo.backend().scatter(to, from, options));
                  }});
  }

  c10::intrusive_ptr<c10d::Work> alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& to_sizes,
      std::vector<int64_t>& from_sizes,
      const c10d::AllToAllOptions& options) override {
    return start({OpType::ALLTOALL_BASE,
                  options.asyncOp,
                  -1,
                  {input},
                  {output},
                  [options, to = twin(output), from = twin(input), to_sizes,
                   from_sizes](Gloo& gloo) mutable {
                    gloo.wait(gloo.backend().alltoall_base(
                        to, from, to_sizes, from_sizes, options));
                  }});
  }

  c10::intrusive_ptr<c10d::Work> send(Tensors& tensors, int peer,
                                      int tag) override {
    return start({OpType::SEND,
                  true,
                  peer,
                  tensors,
                  {},
                  [all = twins(tensors), peer, tag](Gloo& gloo) mutable {
                    gloo.wait_for_message(gloo.backend().send(all, peer, tag));
                  }});
  }

  c10::intrusive_ptr<c10d::Work> recv(Tensors& tensors, int peer,
                                      int tag) override {
    return start({OpType::RECV,
                  true,
                  peer,
                  {},
                  tensors,
                  [all = twins(tensors), peer, tag](Gloo& gloo) mutable {
                    gloo.wait_for_message(gloo.backend().recv(all, peer, tag));
                  }});
  }

  c10::intrusive_ptr<c10d::Work> barrier(
      const c10d::BarrierOptions& options) override {
    return start({OpType::BARRIER, true, -1, {}, {}, [options](Gloo& gloo) {
                    c10d::BarrierOptions plain = options;
                    plain.device_ids.clear();
                    gloo.wait(gloo.backend().barrier(plain));
                  }});
  }

 private:
  static at::Tensor twin(const at::Tensor& tensor) {
    return Twins(c10::kCPU).of(tensor);
  }
  template <typename Many>
  static Many twins(const Many& tensors) {
    Twins twins(c10::kCPU);
    return twins_of(twins, tensors);
  }

  // Tensors that an operation uses have one device; a barrier has none.
  c10::DeviceIndex device_of(const Operation& operation) const {
    const at::Tensor* first = nullptr;
    for (const Tensors* some : {&operation.inputs, &operation.outputs}) {
      for (const at::Tensor& tensor : *some) {
        TORCH_CHECK(tensor.device().type() == kType,
                    "late process group: a tensor is on ", tensor.device());
        TORCH_CHECK(first == nullptr || first->device() == tensor.device(),
                    "late process group: tensors on two devices");
        first = &tensor;
      }
    }
    return first == nullptr ? current_device() : first->device().index();
  }

  // The stream of collectives (peer -1) or of messages of a pair of ranks.
  const c10::Stream& stream_of(c10::DeviceIndex index, int peer) {
    const auto found = streams_.find({index, peer});
    if (found != streams_.end()) return found->second;
    return streams_.emplace(std::pair(index, peer), stream_of_pool(index, true))
        .first->second;
  }

  // As NCCL's groups: an asynchronous operation runs on a stream of the group,
  // behind the caller's; any other one on the caller's stream. Collectives of a
  // group follow each other, on whatever streams.
  c10::intrusive_ptr<c10d::Work> start(Operation operation) {
    const c10::DeviceIndex index = device_of(operation);
    const std::lock_guard lock(mutex_);
    drop_ended();
    ++num_issued_;
    const c10::Stream current = current_stream(index);
    const c10::Stream stream =
        operation.is_async ? stream_of(index, operation.peer) : current;
    if (stream != current) wait_for(stream, mark_end(current));
    MarkPtr& last = last_[operation.peer];
    if (operation.peer < 0) wait_for(stream, last);
    const auto end = std::make_shared<End>();
    enqueue(stream, [gloo = gloo_, end, run = std::move(operation.run)] {
      try {
        run(*gloo);
      } catch (...) {
        end->error = std::current_exception();
        throw;
      }
    });
    end->mark = last = mark_end(stream);
    return c10::make_intrusive<LateWork>(getRank(), operation.type, stream, end,
                                         shelf_of(operation, end->mark),
                                         std::move(operation.outputs));
  }

  std::shared_ptr<Shelf> shelf_of(const Operation& operation, MarkPtr end) {
    auto shelf = std::make_shared<Shelf>();
    if (!operation.is_async) return shelf;
    for (const auto& tensor : operation.inputs) shelf->add(tensor);
    for (const auto& tensor : operation.outputs) shelf->add(tensor);
    shelves_.emplace_back(std::move(end), shelf);
    return shelf;
  }

  // c10d drops tensors of operations that have ended when it is called again.
  void drop_ended() {
    shelves_.remove_if([](const auto& entry) {
      if (!entry.first->is_fired()) return false;
      entry.second->clear();
      return true;
    });
  }

  const std::shared_ptr<Gloo> gloo_;
  std::mutex mutex_;  // guards what follows
  std::atomic<uint64_t> num_issued_ = 0;
  std::map<std::pair<c10::DeviceIndex, int>, c10::Stream> streams_;
  std::map<int, MarkPtr> last_;
  std::list<std::pair<MarkPtr, std::shared_ptr<Shelf>>> shelves_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> new_process_group(
    c10::intrusive_ptr<c10d::Backend> gloo) {
  return c10::make_intrusive<Group>(std::move(gloo));
}

}  // namespace smp::late
