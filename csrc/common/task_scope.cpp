#include "csrc/common/task_scope.h"

namespace smp {
namespace {

thread_local Task task_of_thread;

}  // namespace

const Task& current_task() { return task_of_thread; }

TaskScope::TaskScope(Task task) : previous_(task_of_thread) {
  task_of_thread = task;
}

TaskScope::~TaskScope() { task_of_thread = previous_; }

}  // namespace smp
