#pragma once

#include <vector>

#include "csrc/comm/communicator.h"

namespace smp::comm {

/// The functions of the shared library libsmp_mpi.so. The adapter is a library
/// of its own because libmpi has side effects: it brings a dozen libraries, and
/// UCX among them patches the memory functions of the process. A process that
/// does not ask for MPI never loads it.
struct MpiPlugin {
  CommunicatorPtr (*make_world)();
  CommunicatorPtr (*make_group)(const std::vector<int>& global_ranks);
  void (*finalize)();
};

inline constexpr const char* kMpiPluginFile = "libsmp_mpi.so";
inline constexpr const char* kMpiPluginSymbol = "smp_mpi_plugin";

}  // namespace smp::comm
