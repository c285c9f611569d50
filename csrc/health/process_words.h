#pragma once

#include <string>

namespace smp::health {

/// Equal in processes that see each other under the same numbers.
std::string process_space();

/// What the system says of a process of this machine, for reports: "process 71
/// is stopped; kill -CONT 71 lets it go on". Empty when there is none.
std::string process_words(int pid);

}  // namespace smp::health
