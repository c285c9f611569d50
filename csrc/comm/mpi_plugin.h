#pragma once

#include <vector>

#include "csrc/comm/communicator.h"

namespace smp::comm {

/// What the shared library libsmp_mpi.so offers. The adapter is a library of
/// its own because loading libmpi is not innocent: it brings a dozen libraries,
/// and UCX among them patches the memory functions of the process. A process
/// that does not ask for MPI never loads it.
struct MpiPlugin {
  CommunicatorPtr (*make_world)();
  CommunicatorPtr (*make_group)(const std::vector<int>& global_ranks);
  void (*finalize)();
};

inline constexpr const char* kMpiPluginFile = "libsmp_mpi.so";
inline constexpr const char* kMpiPluginSymbol = "smp_mpi_plugin";

}  // namespace smp::comm
