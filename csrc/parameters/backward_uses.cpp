#include "csrc/parameters/backward_uses.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "csrc/autograd/after_backward.h"

namespace smp::parameters {

// Note [Order of a backward]
//
// Nodes are numbered as they are made, by the thread that runs the forward, and
// a node is made after those that it leads to. The engine takes, of the nodes
// that are ready, the one with the highest number; hence by induction it takes
// all that it will run in the order of falling numbers (but for the
// accumulation of gradients, which needs no parameters). When it comes to a
// node with number n, those above n are done. A call whose nodes have the
// numbers [first, end) is over as soon as a node below `first` has its turn.
//
// So nothing has to be put on the inputs of a module to learn when its backward
// is over, and in-place operations on them work as they do elsewhere. Calls
// that nothing precedes (embeddings) end with the backward.

void BackwardUses::begin(const BackwardUsePtr& use) {
  const int task = torch::autograd::get_current_graph_task_id();
  std::vector<int> wanted;
  std::vector<int> done;
  {
    const std::lock_guard lock(mutex_);
    if (use->task == task && !use->is_kept) return;  // another result of it
    if (use->task < 0) {
      wanted = use->units;
    } else {
      std::erase(active_[use->task].uses, use);
    }
    use->is_kept = false;
    join(task, use);
    done = take_finished(active_[task].uses, *use);
  }
  store_->hold(wanted, done);
}

void BackwardUses::keep(const BackwardUsePtr& use) {
  const int task = torch::autograd::get_current_graph_task_id();
  {
    const std::lock_guard lock(mutex_);
    const Uses& active = active_[task].uses;
    const bool is_held =
        std::all_of(use->units.begin(), use->units.end(), [&](int unit) {
          return std::any_of(active.begin(), active.end(), [&](const auto& a) {
            return std::find(a->units.begin(), a->units.end(), unit) !=
                   a->units.end();
          });
        });
    if (is_held) return;
    use->is_kept = true;
    join(task, use);
  }
  store_->hold(use->units);
}

void BackwardUses::join(int task, const BackwardUsePtr& use) {
  use->task = task;
  Backward& backward = active_[task];
  backward.uses.push_back(use);
  if (std::exchange(backward.will_end, true)) return;
  // A backward that fails destroys the callback without having called it.
  const std::weak_ptr<BackwardUses> weak = weak_from_this();
  auto guard = std::shared_ptr<void>(nullptr, [weak, task](void*) {
    try {
      if (const auto self = weak.lock()) self->end(task);
    } catch (const std::exception&) {
      // The failure was reported already.
    }
  });
  autograd::call_after_backward([guard = std::move(guard), weak, task] {
    if (const auto self = weak.lock()) self->end(task);
  });
}

// Takes out the calls that `use` precedes, and those kept with the same units.
// Returns the units of all.
std::vector<int> BackwardUses::take_finished(Uses& active,
                                             const BackwardUse& use) {
  std::vector<int> done;
  std::erase_if(active, [&](const BackwardUsePtr& other) {
    const bool is_over = !other->is_kept && other->thread == use.thread &&
                         other->first >= use.end;
    if (!is_over) return false;
    done.insert(done.end(), other->units.begin(), other->units.end());
    other->task = -1;
    return true;
  });
  const std::vector<int> over = done;
  std::erase_if(active, [&](const BackwardUsePtr& other) {
    const bool is_over =
        other->is_kept && std::any_of(over.begin(), over.end(), [&](int unit) {
          return std::find(other->units.begin(), other->units.end(), unit) !=
                 other->units.end();
        });
    if (!is_over) return false;
    done.insert(done.end(), other->units.begin(), other->units.end());
    other->task = -1;
    other->is_kept = false;
    return true;
  });
  return done;
}

void BackwardUses::end(int task) {
  std::vector<int> done;
  {
    const std::lock_guard lock(mutex_);
    const auto found = active_.find(task);
    if (found == active_.end()) return;
    for (const BackwardUsePtr& use : found->second.uses) {
      done.insert(done.end(), use->units.begin(), use->units.end());
      use->task = -1;
      use->is_kept = false;
    }
    active_.erase(found);
  }
  store_->release(done);
  store_->end_passing();
}

}  // namespace smp::parameters
