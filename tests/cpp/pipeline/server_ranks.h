#pragma once

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "csrc/pipeline/remote_call.h"
#include "csrc/pipeline/server.h"
#include "csrc/shm/shared_memory.h"
#include "tests/cpp/comm/run_ranks.h"
#include "tests/cpp/lanes/fake_source.h"
#include "tests/cpp/memory/fake_device.h"

namespace smp::pipeline {

/// Sizes of the modules' data: more than what travels inside of requests.
inline constexpr int64_t kRows = 16;
inline constexpr int64_t kWidth = 24;
inline constexpr int64_t kTensorBytes = kRows * kWidth * 8;

/// A fixed, different matrix for each rank, which requires a gradient.
at::Tensor make_weight(int rank);
/// Likewise for each microbatch; requires none.
at::Tensor make_input(int mb);
/// Returns the result of the module of a rank that has this weight.
at::Tensor compute(const at::Tensor& x, const at::Tensor& weight);

/// Settings that the ranks of a test share.
struct RankSettings {
  int size = 2;
  std::string policy = "interleaved";
  /// Results are tensors without data; else they are fetched at once.
  bool has_handles = true;
  bool has_shared_memory = false;
  int active_microbatches = 0;
  int num_chunks = 1;
  std::chrono::milliseconds hold_back_timeout = std::chrono::seconds(10);
  /// Device i + 1 of the fake ones is that of rank i.
  bool has_devices = false;
  std::optional<lanes::FakeOptions> lanes = {};

  int num_modules() const { return size * num_chunks; }
  c10::Device device_of(int rank) const {
    return has_devices ? fake_device::device(rank + 1)
                       : c10::Device(c10::DeviceType::CPU);
  }
};

class Ranks {
 public:
  explicit Ranks(RankSettings the_settings);

  /// In processes the liveness channel brings such news.
  void tell_others(int rank, const std::string& where, const std::string& what);
  void tell(int rank, const health::Fault& fault);

  const RankSettings settings;
  std::vector<std::shared_ptr<health::FaultBoard>> boards;
  std::vector<shm::SharedMemoryPtr> memories;
};

/// One rank: a server, and its modules. Module i, "stage<i>", is on rank
/// i % size and computes tanh(x W) with the rank's W unless `modules` says
/// otherwise.
class Rank {
 public:
  /// Gets the arguments and returns the results.
  using Module =
      std::function<std::vector<at::Tensor>(std::vector<at::Tensor>)>;

  Rank(Ranks& ranks, int rank, const comm::CommunicatorPtr& world);
  ~Rank();

  int size() const { return ranks_.settings.size; }
  /// Device on which the rank's tensors live.
  c10::Device device() const { return ranks_.settings.device_of(rank); }

  /// Calls a module where it lives.
  RemoteResult call(int module, const std::vector<at::Tensor>& inputs,
                    const std::string& structure = "call");
  at::Tensor call_one(int module, const at::Tensor& input);
  /// A tensor of this rank that gets real gradients although it is an argument
  /// elsewhere.
  at::Tensor leave(const at::Tensor& tensor);
  /// The data behind a handle, in its graph.
  at::Tensor arrive(const at::Tensor& handle);

  /// Driver: hands the loss to the others and runs its backward.
  void train_on(int mb, const at::Tensor& loss);
  /// Others: what `train_on` of the driver asks of them.
  void follow(int mb);
  /// The body that runs the chain of all modules.
  void chain(int mb);

  void step(int num_microbatches, const std::function<void(int)>& body);
  void step_of_chains(int num_microbatches) {
    step(num_microbatches, [this](int mb) { chain(mb); });
  }
  /// Expects that nothing of a step is left.
  void expect_empty() const;

  const int rank;
  at::Tensor w;
  std::map<int64_t, Module> modules;
  std::vector<double> losses;
  std::vector<std::string> errors;  ///< of contexts of this rank
  std::shared_ptr<mailbox::Mailbox> mailbox;
  std::unique_ptr<Server> server;

 private:
  Call serve(Call call);
  void tell_own_fault() const;

  Ranks& ranks_;
  int fault_subscription_ = 0;
};

/// Runs `body` on each rank, as a thread.
void run_servers(const RankSettings& settings,
                 const std::function<void(Rank&, Ranks&)>& body,
                 std::chrono::milliseconds deadline = std::chrono::seconds(60));
inline void run_servers(
    const RankSettings& settings, const std::function<void(Rank&)>& body,
    std::chrono::milliseconds deadline = std::chrono::seconds(60)) {
  run_servers(settings, [&](Rank& self, Ranks&) { body(self); }, deadline);
}

}  // namespace smp::pipeline
