#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "csrc/mailbox/mailbox.h"
#include "csrc/pipeline/structure_cache.h"
#include "csrc/pipeline/timeline.h"
#include "csrc/pipeline/wire.h"

namespace smp::pipeline {

/// Writes and reads messages of Channel::kPipeline: headers of the open step,
/// and structures that travel once. Counts what was sent. Thread-safe.
class Messenger {
 public:
  /// Counts since the beginning, without messages to this rank itself.
  struct Stats {
    int64_t headers = 0;
    std::map<int, int64_t> data_bytes;  ///< tensors, by destination
  };

  /// @param pp_ranks  global ranks of this replica, the driver first
  Messenger(int global_rank, std::vector<int> pp_ranks,
            std::shared_ptr<mailbox::Mailbox> mailbox,
            std::shared_ptr<Timeline> timeline);

  int global_rank() const { return global_rank_; }
  const std::vector<int>& pp_ranks() const { return pp_ranks_; }
  int driver_rank() const { return pp_ranks_.front(); }
  bool is_driver() const { return global_rank_ == driver_rank(); }

  /// The step that headers name from now on; -1 before the first one.
  void set_step(int64_t step) { step_ = step; }
  int64_t step() const { return step_; }
  Header header_of(Kind kind, int64_t mb) const;

  void post(int dst, Header header, const std::string& structure = {},
            std::vector<mailbox::MessageTensor> tensors = {});
  /// Posts a message to all other ranks of the replica.
  void post_to_others(const Header& header, const std::string& structure = {},
                      const std::vector<mailbox::MessageTensor>& tensors = {});
  /// Returns the header of a message and replaces the message's bytes by its
  /// structure. Call it in the order of arrival, so that no id precedes its
  /// bytes.
  Header open(mailbox::Message& message);

  Stats stats() const;

 private:
  const int global_rank_;
  const std::vector<int> pp_ranks_;
  const std::shared_ptr<mailbox::Mailbox> mailbox_;
  const std::shared_ptr<Timeline> timeline_;
  StructureCache structures_;
  std::atomic<int64_t> step_{-1};
  mutable std::mutex stats_mutex_;
  Stats stats_;
};

}  // namespace smp::pipeline
