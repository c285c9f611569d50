#include <dlfcn.h>

#include <atomic>
#include <mutex>
#include <string>

#include "csrc/comm/mpi_communicator.h"
#include "csrc/comm/mpi_plugin.h"
#include "csrc/common/check.h"

// The functions of mpi_communicator.h for the core: they load the adapter at
// the first call and forward. The adapter defines the same names; both are
// hidden, so the two never meet.
namespace smp::comm {
namespace {

std::atomic<const MpiPlugin*> loaded_plugin{nullptr};

// Returns the folder of the library or program that this code is part of.
std::string own_folder() {
  Dl_info info;
  SMP_CHECK(::dladdr(&loaded_plugin, &info) != 0,
            "cannot find the folder of the smp extension");
  const std::string path = info.dli_fname;
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash);
}

const MpiPlugin& plugin() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (const MpiPlugin* known = loaded_plugin) return *known;
  const std::string path = own_folder() + "/" + kMpiPluginFile;
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  SMP_CHECK(library != nullptr, "cannot load the MPI adapter: ", ::dlerror(),
            "; is the Open MPI that smp was built with still installed?");
  void* symbol = ::dlsym(library, kMpiPluginSymbol);
  SMP_CHECK(symbol != nullptr, path, " is not the MPI adapter of smp");
  loaded_plugin = static_cast<const MpiPlugin*>(symbol);
  return *loaded_plugin;
}

}  // namespace

bool mpi_available() { return true; }

CommunicatorPtr make_mpi_world() { return plugin().make_world(); }

CommunicatorPtr make_mpi_group(const std::vector<int>& global_ranks) {
  return plugin().make_group(global_ranks);
}

void mpi_finalize() {
  const MpiPlugin* known = loaded_plugin;
  if (known != nullptr) known->finalize();  // else there is nothing to end
}

}  // namespace smp::comm
