#include "tests/cpp/lanes/fake_meeting.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "csrc/common/check.h"
#include "csrc/health/thread_name.h"
#include "csrc/lanes/byte_strings.h"
#include "tests/cpp/lanes/shared_file.h"

namespace smp::lanes {
namespace {

using memory::Mark;
using memory::MarkedTensor;

constexpr std::chrono::microseconds kLookForPeerEvery{20};
constexpr int64_t kPieceBytes = 16 << 10;

// Place where both ends of a channel meet.
struct MeetingPlace {
  struct End {
    std::atomic<uint64_t> num_asked;  // copies that have begun there
    std::atomic<int64_t> num_bytes;   // of the last one
  };
  End sender;
  End receiver;
  std::atomic<uint64_t> num_filled;  // pieces
  std::atomic<uint64_t> num_emptied;
  std::array<uint8_t, kPieceBytes> piece;
};

// One end of a channel and its stream.
class ChannelEnd {
 public:
  ChannelEnd(const CopyChannel& channel, bool is_sender, DeviceMemory memory,
             const FakeOptions& options, int global_rank,
             std::shared_ptr<health::FaultBoard> faults,
             std::shared_ptr<FakeDevice> device)
      : channel_(channel),
        is_sender_(is_sender),
        memory_(std::move(memory)),
        place_(*reinterpret_cast<MeetingPlace*>(memory_.get())),
        global_rank_(global_rank),
        faults_(std::move(faults)),
        device_(std::move(device)),
        times_(options, 64 * global_rank + 8 * channel.src + 2 * channel.index +
                            (is_sender ? 1 : 0)),
        thread_([this] { run(); }) {}
  ~ChannelEnd() { stop(); }

  Mark ask(const at::Tensor& tensor) {
    const auto end = std::make_shared<LateEvent>(faults_);
    {
      const std::lock_guard lock(mutex_);
      SMP_CHECK(!is_stopping_,
                "a copy was asked for after its lane was closed");
      const bool is_first = std::exchange(is_first_, false);
      works_.push_back(
          {tensor, end, !is_first, is_first ? 0 : device_->num_asked++});
    }
    changed_.notify_one();
    return Mark(end);
  }

  void begin_stop() {
    {
      const std::lock_guard lock(mutex_);
      is_stopping_ = true;
    }
    changed_.notify_all();
  }

  void stop() {
    begin_stop();
    if (thread_.joinable()) thread_.join();
    for (const Work& work : works_) work.end->drop();
    works_.clear();
  }

 private:
  struct Work {
    at::Tensor tensor;
    std::shared_ptr<LateEvent> end;
    bool has_turn;
    uint64_t turn;  // on the device
  };

  void run() {
    health::name_this_thread(is_sender_ ? "smp-fake-send" : "smp-fake-recv");
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return is_stopping_ || !works_.empty(); });
      if (is_stopping_) return;
      Work& work = works_.front();  // stays where it is
      lock.unlock();
      const bool has_come = copy(work);
      if (has_come && work.has_turn) ++device_->num_over;
      if (has_come) work.end->end();
      lock.lock();
      if (!has_come) {
        changed_.wait(lock, [this] { return is_stopping_.load(); });
        return;
      }
      works_.pop_front();
    }
  }

  bool wait_until(const std::function<bool()>& condition) const {
    while (!condition()) {
      if (is_stopping_) return false;
      std::this_thread::sleep_for(kLookForPeerEvery);
    }
    return true;
  }

  // Returns whether the copy is over; after false there are no more copies.
  bool copy(const Work& work) {
    const at::Tensor& tensor = work.tensor;
    const uint64_t number = ++num_copies_;
    if (work.has_turn) {
      const auto delay = times_.next();
      if (!delay) return false;
      std::this_thread::sleep_for(*delay);
      const auto is_next = [&] { return device_->num_over == work.turn; };
      if (!wait_until(is_next)) return false;
    }
    const auto num_bytes = static_cast<int64_t>(tensor.nbytes());
    MeetingPlace::End& own = is_sender_ ? place_.sender : place_.receiver;
    MeetingPlace::End& other = is_sender_ ? place_.receiver : place_.sender;
    own.num_bytes = num_bytes;
    own.num_asked = number;
    if (!wait_until([&] { return other.num_asked >= number; })) return false;
    if (other.num_bytes != num_bytes) {
      tell_mismatch(number, num_bytes, other.num_bytes);
      return false;
    }
    auto* const data = static_cast<uint8_t*>(tensor.mutable_data_ptr());
    int64_t at = 0;
    do {  // also what has no bytes: neither end goes on before the other
      const int64_t size = std::min(kPieceBytes, num_bytes - at);
      if (!move_piece(data + at, static_cast<size_t>(size))) return false;
      at += size;
    } while (at < num_bytes);
    return true;
  }

  bool move_piece(uint8_t* data, size_t size) {
    if (is_sender_) {
      std::memcpy(place_.piece.data(), data, size);
      const uint64_t number = ++place_.num_filled;
      return wait_until([&] { return place_.num_emptied >= number; });
    }
    const uint64_t number = place_.num_emptied + 1;
    if (!wait_until([&] { return place_.num_filled >= number; })) return false;
    std::memcpy(data, place_.piece.data(), size);
    place_.num_emptied = number;
    return true;
  }

  void tell_mismatch(uint64_t number, int64_t here, int64_t there) const {
    faults_->report(
        {.kind = health::Fault::Kind::kRaised,
         .global_rank = global_rank_,
         .where = "a lane of tests",
         .text = detail::concat("copy ", number, " of channel ", channel_.index,
                                " from global_rank ", channel_.src,
                                " to global_rank ", channel_.dst, " has ", here,
                                " bytes here and ", there, " there")});
  }

  const CopyChannel channel_;
  const bool is_sender_;
  const DeviceMemory memory_;
  MeetingPlace& place_;
  const int global_rank_;
  const std::shared_ptr<health::FaultBoard> faults_;
  const std::shared_ptr<FakeDevice> device_;
  CopyTimes times_;                       // of the thread
  uint64_t num_copies_ = 0;               // likewise
  std::atomic<bool> is_stopping_{false};  // set with `mutex_`
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> works_;
  bool is_first_ = true;
  std::thread thread_;
};

class FakeMeeting final : public MeetingCopies {
 public:
  FakeMeeting(const FakeOptions& options, int global_rank,
              std::shared_ptr<health::FaultBoard> faults,
              std::shared_ptr<FakeDevice> device)
      : options_(options),
        global_rank_(global_rank),
        faults_(std::move(faults)),
        device_(std::move(device)) {}

  // The receiver has the places.
  std::string offer(const std::vector<CopyChannel>& channels) override {
    std::vector<std::string> parts;
    for (const CopyChannel& channel : channels) {
      if (channel.dst != global_rank_) continue;
      const auto made = places_.emplace(channel, sizeof(MeetingPlace)).first;
      parts.push_back(name_of(channel));
      parts.push_back(made->second.handle());
    }
    return pack(parts);
  }

  void connect(const CopyChannel& channel,
               const std::string& offer_of_peer) override {
    const bool is_sender = channel.src == global_rank_;
    DeviceMemory memory =
        is_sender ? find(channel, offer_of_peer) : places_.at(channel).memory();
    const std::lock_guard lock(mutex_);
    SMP_CHECK(!is_stopped_, "the lane is closed");
    ends_[channel] =
        std::make_unique<ChannelEnd>(channel, is_sender, std::move(memory),
                                     options_, global_rank_, faults_, device_);
  }

  Mark send(const CopyChannel& channel, const at::Tensor& data) override {
    return end_of(channel).ask(data);
  }

  MarkedTensor receive(const CopyChannel& channel, at::IntArrayRef sizes,
                       at::ScalarType dtype) override {
    MarkedTensor result;
    {
      const std::lock_guard lock(device_->allocator);
      result.data = at::empty(sizes, dtype);
    }
    fill_with_nonsense(result.data);
    result.mark = end_of(channel).ask(result.data);
    return result;
  }

  void stop() override {
    const std::lock_guard lock(mutex_);
    is_stopped_ = true;
    for (const auto& [channel, end] : ends_) end->begin_stop();
    for (const auto& [channel, end] : ends_) end->stop();
  }

 private:
  static std::string name_of(const CopyChannel& channel) {
    return detail::concat(channel.src, " ", channel.dst, " ", channel.index);
  }

  static DeviceMemory find(const CopyChannel& channel,
                           const std::string& offer) {
    const std::vector<std::string> parts = unpack(offer);
    const auto found = std::find(parts.begin(), parts.end(), name_of(channel));
    SMP_CHECK(found != parts.end(), "global_rank ", channel.dst,
              " does not offer channel ", channel.index);
    return SharedFile::open(*(found + 1));
  }

  ChannelEnd& end_of(const CopyChannel& channel) {
    const std::lock_guard lock(mutex_);
    const auto found = ends_.find(channel);
    SMP_CHECK(found != ends_.end(), "channel ", channel.index,
              " from global_rank ", channel.src, " to global_rank ",
              channel.dst, " is not connected");
    return *found->second;
  }

  const FakeOptions options_;
  const int global_rank_;
  const std::shared_ptr<health::FaultBoard> faults_;
  const std::shared_ptr<FakeDevice> device_;
  std::map<CopyChannel, SharedFile> places_;  // does not change after `offer`
  std::mutex mutex_;
  bool is_stopped_ = false;
  std::map<CopyChannel, std::unique_ptr<ChannelEnd>>
      ends_;  // none goes before the end
};

}  // namespace

bool FakeDevice::find_memory(std::chrono::milliseconds patience) {
  const std::lock_guard lock(allocator);
  const uint64_t goal = num_asked;
  const auto end = std::chrono::steady_clock::now() + patience;
  while (num_over < goal && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(kLookForPeerEvery);
  }
  return num_over >= goal;
}

std::unique_ptr<MeetingCopies> make_fake_meeting(
    const FakeOptions& options, int global_rank,
    std::shared_ptr<health::FaultBoard> faults,
    std::shared_ptr<FakeDevice> device) {
  return std::make_unique<FakeMeeting>(options, global_rank, std::move(faults),
                                       std::move(device));
}

}  // namespace smp::lanes
