#include "csrc/comm/mpi_communicator.h"
#include "csrc/common/check.h"

namespace smp::comm {
namespace {

[[noreturn]] void raise_missing() {
  throw Error(rank_prefix() +
              "this build has no MPI adapter; install Open MPI (for instance "
              "apt install libopenmpi-dev, or the openmpi Python package) and "
              "build again with SMP_MPI=on");
}

}  // namespace

bool mpi_available() { return false; }
CommunicatorPtr make_mpi_world() { raise_missing(); }
CommunicatorPtr make_mpi_group(const std::vector<int>&) { raise_missing(); }
void mpi_finalize() {}

}  // namespace smp::comm
