#pragma once

#include <functional>
#include <string>
#include <vector>

#include "csrc/comm/communicator.h"

namespace smp::comm::suite {

/// One promise of Communicator. `check` runs on every rank of a group at the
/// same time and throws when the promise is broken.
struct Check {
  std::string name;
  std::function<void(Communicator&)> check;
};

/// Returns the checks that every backend must pass. Each check leaves the
/// communicator usable and without messages in flight (receives that were given
/// up have tags of their own).
const std::vector<Check>& all_checks();

/// `abort` ends waits; the communicator is of no use afterwards.
/// @param with_collective  also a collective that the others never join
void check_abort_ends_waits(Communicator& comm, bool with_collective);

}  // namespace smp::comm::suite
