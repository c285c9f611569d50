#include "csrc/comm/mpi_plugin.h"

#include "csrc/comm/mpi_communicator.h"
#include "csrc/common/check.h"

// The one symbol that the core looks up; see mpi_loader.cpp.
extern "C" SMP_EXPORT const smp::comm::MpiPlugin smp_mpi_plugin;
const smp::comm::MpiPlugin smp_mpi_plugin = {&smp::comm::make_mpi_world,
                                             &smp::comm::make_mpi_group,
                                             &smp::comm::mpi_finalize};
