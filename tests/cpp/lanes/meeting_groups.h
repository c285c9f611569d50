#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "csrc/comm/communicator.h"
#include "csrc/common/check.h"
#include "csrc/lanes/meeting_copies.h"
#include "csrc/memory/device_scope.h"

namespace smp::lanes {

/// Place where the two ranks of a test's group meet.
struct MeetingRoom {
  struct Part {
    at::Tensor tensor;
    std::shared_ptr<std::atomic<bool>> is_over =
        std::make_shared<std::atomic<bool>>(false);
  };

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Part> sends;
  std::deque<Part> receives;
  std::atomic<bool> is_aborted{false};
  std::atomic<int> num_waiting{0};  // streams

  std::shared_ptr<std::atomic<bool>> ask(const at::Tensor& tensor,
                                         bool is_send) {
    const std::lock_guard lock(mutex);
    Part part{tensor};
    const auto is_over = part.is_over;
    (is_send ? sends : receives).push_back(std::move(part));
    while (!sends.empty() && !receives.empty()) {
      SMP_CHECK(
          sends.front().tensor.nbytes() == receives.front().tensor.nbytes(),
          "sizes differ");
      std::memcpy(receives.front().tensor.mutable_data_ptr(),
                  sends.front().tensor.const_data_ptr(),
                  sends.front().tensor.nbytes());
      *sends.front().is_over = *receives.front().is_over = true;
      sends.pop_front();
      receives.pop_front();
    }
    changed.notify_all();
    return is_over;
  }
};

/// A send or receive. The thread that orders a stream plays the stream.
class MeetingWork final : public comm::Work {
 public:
  MeetingWork(std::shared_ptr<MeetingRoom> room,
              std::shared_ptr<std::atomic<bool>> is_over)
      : room_(std::move(room)), is_over_(std::move(is_over)) {}

  bool done() override { return *is_over_ || room_->is_aborted; }
  void wait(std::chrono::milliseconds /*timeout*/) override {
    SMP_CHECK(false, "the host waits for a device");
  }
  bool order_stream() override {
    std::unique_lock lock(room_->mutex);
    ++room_->num_waiting;
    room_->changed.wait(lock, [&] { return *is_over_ || room_->is_aborted; });
    --room_->num_waiting;
    SMP_CHECK(*is_over_, "send or recv: aborted");
    return true;
  }

 private:
  const std::shared_ptr<MeetingRoom> room_;
  const std::shared_ptr<std::atomic<bool>> is_over_;
};

/// One rank of a group that looks like one of NCCL with two ranks: a send and a
/// receive end together, in the order of calls.
class MeetingGroup : public comm::Communicator {
 public:
  MeetingGroup(std::shared_ptr<MeetingRoom> room, int group_rank,
               bool is_stream_ordered = true)
      : room_(std::move(room)),
        group_rank_(group_rank),
        is_stream_ordered_(is_stream_ordered) {}

  int group_rank() const override { return group_rank_; }
  int size() const override { return 2; }
  const std::string& name() const override { return name_; }
  bool is_stream_ordered() const override { return is_stream_ordered_; }

  comm::WorkPtr send(const at::Tensor& tensor, int dst, int /*tag*/) override {
    SMP_CHECK(dst == 1 - group_rank_, "a rank sends to itself");
    return ask(tensor, true);
  }
  comm::WorkPtr recv(at::Tensor tensor, int src, int /*tag*/) override {
    SMP_CHECK(src == 1 - group_rank_, "a rank gets from itself");
    return ask(tensor, false);
  }
  void abort() override {
    {
      const std::lock_guard lock(room_->mutex);
      room_->is_aborted = true;
    }
    room_->changed.notify_all();
  }

  /// The stream on which each operation was asked for.
  std::vector<c10::StreamId> streams;

  comm::WorkPtr all_reduce(at::Tensor, comm::ReduceOp) override {
    return refuse();
  }
  comm::WorkPtr broadcast(at::Tensor, int) override { return refuse(); }
  comm::WorkPtr all_gather(at::Tensor, const at::Tensor&) override {
    return refuse();
  }
  comm::WorkPtr reduce_scatter(at::Tensor, const at::Tensor&,
                               comm::ReduceOp) override {
    return refuse();
  }
  comm::WorkPtr all_to_all(at::Tensor, const at::Tensor&) override {
    return refuse();
  }
  comm::WorkPtr all_to_all_v(at::Tensor, const at::Tensor&, const comm::Counts&,
                             const comm::Counts&) override {
    return refuse();
  }
  comm::WorkPtr barrier() override { return refuse(); }

 private:
  static comm::WorkPtr refuse() {
    throw Error("a channel has sends and receives only");
  }
  comm::WorkPtr ask(const at::Tensor& tensor, bool is_send) {
    SMP_CHECK(!room_->is_aborted, "aborted");
    SMP_CHECK(tensor.dim() == 1 && tensor.scalar_type() == at::kByte,
              "expected bytes");
    const auto stream = memory::current_stream(tensor.device());
    streams.push_back(stream ? stream->id() : -1);
    return std::make_shared<MeetingWork>(room_, room_->ask(tensor, is_send));
  }

  const std::shared_ptr<MeetingRoom> room_;
  const int group_rank_;
  const bool is_stream_ordered_;
  const std::string name_ = "meeting:channel";
};

/// The rooms of all channels; any thread.
class MeetingRooms {
 public:
  std::shared_ptr<MeetingRoom> of(const CopyChannel& channel) {
    const std::lock_guard lock(mutex_);
    std::shared_ptr<MeetingRoom>& room = rooms_[channel];
    if (!room) room = std::make_shared<MeetingRoom>();
    return room;
  }

 private:
  std::mutex mutex_;
  std::map<CopyChannel, std::shared_ptr<MeetingRoom>> rooms_;
};

}  // namespace smp::lanes
