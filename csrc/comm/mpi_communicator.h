#pragma once

#include <vector>

#include "csrc/comm/communicator.h"

namespace smp::comm {

/// Returns whether this build has the MPI adapter.
bool mpi_available();

/// Makes a communicator of all processes of the MPI job, ordered by MPI rank.
/// The first call starts MPI unless the program has done so. Each call makes a
/// communicator of its own (MPI_Comm_dup), whose messages never meet others.
///
/// CPU tensors. Sums of bfloat16 and float16, which MPI lacks, are made in
/// float32 and rounded once. A receive that was given up is cancelled.
/// Collective: call on every process.
/// @throws Error when MPI is not built in, or lacks support for threads
CommunicatorPtr make_mpi_world();

/// Makes a communicator of some processes of the job; group rank = position in
/// `global_ranks`. Collective: call on each of these processes with the same
/// list.
/// @throws ValueError when the list is empty, has doubles or ranks that do not
///         exist, or lacks the calling process
CommunicatorPtr make_mpi_group(const std::vector<int>& global_ranks);

/// Ends MPI if `make_mpi_world` started it; call it when all communicators are
/// gone or unused. Collective. After an `abort` it does nothing, because peers
/// may never arrive: the job then ends as a failed one. May be called twice;
/// MPI cannot be started again.
void mpi_finalize();

}  // namespace smp::comm
