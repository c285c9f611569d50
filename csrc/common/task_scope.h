#pragma once

#include <cstdint>

namespace smp {

/// The work of the calling thread. Rooms of the same layer share this header
/// instead of each other's headers: the server sets the task, the reducer and
/// the random state read it.
struct Task {
  int64_t step = -1;
  int mb = -1;  ///< microbatch index; -1 outside a step
};

/// Returns the task of the calling thread.
const Task& current_task();

/// Sets the calling thread's task for the life of the object.
class TaskScope {
 public:
  explicit TaskScope(Task task);
  ~TaskScope();
  TaskScope(const TaskScope&) = delete;
  TaskScope& operator=(const TaskScope&) = delete;

 private:
  Task previous_;
};

}  // namespace smp
