#include "csrc/common/task_scope.h"

#include <gtest/gtest.h>

#include <thread>

namespace smp {
namespace {

TEST(TaskScopeTest, ScopesNestAndRestore) {
  EXPECT_EQ(current_task().mb, -1);
  {
    const TaskScope outer(Task{3, 0});
    {
      const TaskScope inner(Task{3, 2});
      EXPECT_EQ(current_task().mb, 2);
    }
    EXPECT_EQ(current_task().mb, 0);
    EXPECT_EQ(current_task().step, 3);
  }
  EXPECT_EQ(current_task().step, -1);
}

TEST(TaskScopeTest, EachThreadHasItsOwnTask) {
  const TaskScope here(Task{1, 1});
  int mb_there = 0;
  std::thread([&] { mb_there = current_task().mb; }).join();
  EXPECT_EQ(mb_there, -1);
  EXPECT_EQ(current_task().mb, 1);
}

}  // namespace
}  // namespace smp
