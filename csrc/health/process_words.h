#pragma once

#include <string>

namespace smp::health {

/// Returns a text that is equal in processes with the same process numbers.
std::string process_space();

/// Describes a process of this machine for reports: "process 71 is stopped;
/// kill -CONT 71 lets it go on". Empty when there is none.
std::string process_words(int pid);

}  // namespace smp::health
