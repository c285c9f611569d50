#include "csrc/health/thread_name.h"

#include <pthread.h>

namespace smp::health {

void name_this_thread(const std::string& name) {
  pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
}

}  // namespace smp::health
