#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "csrc/memory/device_meter.h"
#include "csrc/pipeline/timeline.h"
#include "csrc/schedule/policy.h"

namespace smp::pipeline {

struct ServerOptions {
  int global_rank = 0;
  std::vector<int> pp_ranks;     ///< global ranks of this replica
  std::vector<int> order_ranks;  ///< dp peers of this rank, leader first
  std::string policy = schedule::kDefaultPolicy;
  int num_chunks = 1;           ///< parts of each model on each rank
  int active_microbatches = 0;  ///< 0: the policy's default
  bool deterministic = false;
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  /// Meter that gets a mark at the end of each turn; null: the progress of the
  /// device is not watched.
  std::shared_ptr<memory::DeviceMeter> device_meter;
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  /// Time that contexts may take to unwind after a failure elsewhere.
  std::chrono::milliseconds unwind_timeout = std::chrono::seconds(5);
  /// Time that a rank may be idle because the schedule waits while other work
  /// is ready; then the rank does that work. At least 20 times its longest
  /// turn.
  std::chrono::milliseconds hold_back_timeout = std::chrono::seconds(10);
  /// Timeline through which its maker may record the steps; null: the server
  /// makes a timeline of its own.
  std::shared_ptr<Timeline> timeline;

  /// Returns whether peers of this rank run their tasks in one order.
  bool has_order() const { return deterministic && order_ranks.size() > 1; }
  bool leads_order() const {
    return has_order() && order_ranks.front() == global_rank;
  }
};

}  // namespace smp::pipeline
