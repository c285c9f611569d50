#include "csrc/parameters/parameter_store.h"

#include <ATen/ops/isnan.h>
#include <gtest/gtest.h>

#include "tests/cpp/comm/host_world.h"
#include "tests/cpp/parameters/parameter_store_fixture.h"

namespace smp::parameters {
namespace {

using Body = std::function<void(const GatherGroupPtr&)>;

// Gathers by hosts, of the device or of the host.
GatherGroupPtr gathers_of(const comm::HostGroups& groups,
                          const comm::CommunicatorPtr& control) {
  const comm::CommunicatorPtr across = comm::as_wanted(groups.across);
  if (!across->is_stream_ordered()) {
    return make_flat_gathers(comm::make_hierarchical_communicator(groups));
  }
  return make_hierarchical_gathers(across, comm::as_wanted(groups.gather),
                                   control);
}

// On the ranks of `num_hosts` pretended hosts; one host gathers in one hop.
void on_hosts(int num_hosts, int ranks_per_host, const Body& body) {
  if (num_hosts == 1) {
    comm::run_ranks(ranks_per_host,
                    [&](int /*rank*/, const comm::CommunicatorPtr& group) {
                      body(make_flat_gathers(comm::as_wanted(group)));
                    });
    return;
  }
  const comm::HostWorld world{num_hosts, ranks_per_host};
  const std::vector<comm::HostGroups> groups = world.make_groups();
  comm::run_ranks(world.size(),
                  [&](int rank, const comm::CommunicatorPtr& group) {
                    body(gathers_of(groups[rank], group));
                  });
}

// Three units; nothing divides the sizes, and the largest is gathered alone.
const Sharded::Shapes kShapes = {{5, 3}, {2}, {300, 601}, {1}, {7, 7}};
const Sharded::Units kUnits = {{0, 1}, {2, 3}, {4}};

class StoreOnHosts : public testing::TestWithParam<std::pair<int, int>> {};

INSTANTIATE_TEST_SUITE_P(hosts, StoreOnHosts,
                         testing::Values(std::pair{1, 2}, std::pair{1, 4},
                                         std::pair{2, 2}, std::pair{3, 2}));

TEST_P(StoreOnHosts, held_units_are_whole_and_others_have_no_memory) {
  const auto [num_hosts, per_host] = GetParam();
  on_hosts(num_hosts, per_host, [](const GatherGroupPtr& group) {
    for (const auto dtype : {c10::ScalarType::Double, c10::ScalarType::Float,
                             c10::ScalarType::BFloat16}) {
      Sharded sharded(kShapes, kUnits, group, Sharded::patient(), dtype);
      for (int round = 0; round < 2; ++round) {
        for (int unit = 0; unit < 3; ++unit) {
          sharded.store->hold({unit});
          for (int other = 0; other < 3; ++other) {
            for (const int i : kUnits[other]) {
              EXPECT_EQ(sharded.is_whole(i), other == unit);
              EXPECT_EQ(at::isnan(sharded.params[i]).all().item<bool>(),
                        other != unit);
            }
          }
          sharded.store->release({unit});
        }
      }
      EXPECT_EQ(sharded.store->stats().num_gathers, 6);
      EXPECT_EQ(sharded.store->stats().live_elements, 0);
      EXPECT_EQ(sharded.store->stats().peak_live_elements, 300 * 601 + 1);
      EXPECT_TRUE(sharded.store->gather_one(2).equal(sharded.values[2]));
      EXPECT_FALSE(sharded.has_memory(2));
    }
  });
}

TEST(ParameterStore, ranks_that_use_other_units_are_told_of_both) {
  for (const bool ends : {false, true}) {
    on_hosts(1, 2, [&](const GatherGroupPtr& group) {
      Sharded sharded(kShapes, kUnits, group);
      std::string text;
      try {
        if (group->group_rank() == 0) {
          sharded.store->hold({2});
        } else if (ends) {
          sharded.store->meet();
        } else {
          sharded.store->hold({1});
        }
      } catch (const ValueError& error) {
        text = error.what();
      }
      EXPECT_NE(text.find("gathers the parameters of 'unit 2'"), text.npos);
      const char* other = ends ? "has run all that it runs" : "'unit 1'";
      EXPECT_NE(text.find(other), text.npos) << text;
    });
  }
}

TEST(ParameterStore, a_unit_of_small_parameters_takes_one_collective) {
  on_hosts(1, 2, [](const GatherGroupPtr& group) {
    Sharded sharded({{3}, {4, 4}, {5}, {400, 401}}, {{0, 1, 2, 3}}, group);
    sharded.store->hold({0});
    for (int i = 0; i < 4; ++i) EXPECT_TRUE(sharded.is_whole(i));
    EXPECT_EQ(sharded.store->stats().num_collectives, 2) << "and a large one";
    sharded.store->release({0});
  });
}

TEST(ParameterStore, a_gather_is_no_change_and_views_come_back_to_life) {
  on_hosts(1, 2, [](const GatherGroupPtr& group) {
    Sharded sharded(kShapes, kUnits, group);
    sharded.store->hold({0});
    const auto version = sharded.params[0]._version();
    const at::Tensor view = sharded.params[0].detach().t();
    sharded.store->release({0});
    EXPECT_EQ(view.storage().nbytes(), 0u);
    sharded.store->hold({0});
    EXPECT_TRUE(view.equal(sharded.values[0].t()));
    EXPECT_EQ(sharded.params[0]._version(), version);
    sharded.store->release({0});
  });
}

TEST(ParameterStore, small_parameters_stay_whole_until_the_next_update) {
  ParameterStore::Options options = Sharded::patient();
  options.persistence_threshold = 16;
  on_hosts(1, 2, [&](const GatherGroupPtr& group) {
    Sharded sharded(kShapes, kUnits, group, options);
    sharded.store->hold({0});
    EXPECT_THROW(sharded.store->mark_stale(), Error);
    sharded.store->release({0});
    EXPECT_TRUE(sharded.is_whole(0));
    EXPECT_EQ(sharded.store->stats().persistent_elements, 17);
    sharded.store->hold({0});
    sharded.store->release({0});
    EXPECT_EQ(sharded.store->stats().num_gathers, 1);
    sharded.store->hold({1});
    sharded.store->release({1});
    EXPECT_TRUE(sharded.is_whole(3));
    EXPECT_FALSE(sharded.has_memory(2));

    sharded.shards[0].mul_(2);
    sharded.values[0].mul_(2);
    sharded.store->mark_stale();
    EXPECT_FALSE(sharded.has_memory(0));
    sharded.store->hold({0});
    EXPECT_TRUE(sharded.is_whole(0));
    sharded.store->release({0});
    sharded.store->mark_stale();
  });
}

// Four units of ten elements each.
struct Four : Sharded {
  explicit Four(const GatherGroupPtr& group, int64_t max_live,
                int num_ahead = 2)
      : Sharded({{10}, {10}, {10}, {10}}, {{0}, {1}, {2}, {3}}, group,
                limited(max_live, num_ahead)) {}

  static ParameterStore::Options limited(int64_t max_live, int num_ahead) {
    ParameterStore::Options options = patient();
    options.max_live_elements = max_live;
    options.num_ahead = num_ahead;
    return options;
  }

  void pass(const std::vector<int>& order) {
    store->begin_pass(0);
    for (const int unit : order) {
      store->hold({unit});
      EXPECT_TRUE(is_whole(unit));
      store->release({unit});
    }
    store->end_pass();
    for (int i = 0; i < 4; ++i) EXPECT_FALSE(has_memory(i));
  }
};

TEST(ParameterStore, units_are_gathered_ahead_in_the_order_of_the_last_pass) {
  on_hosts(1, 2, [](const GatherGroupPtr& group) {
    Four four(group, 1000);
    four.pass({0, 1, 2, 3});
    EXPECT_EQ(four.store->stats().num_hits, 0);
    EXPECT_EQ(four.store->stats().peak_live_elements, 10);
    four.pass({0, 1, 2, 3});
    EXPECT_EQ(four.store->stats().num_hits, 4);
    EXPECT_EQ(four.store->stats().num_gathers, 8);
    EXPECT_EQ(four.store->stats().peak_live_elements, 30);
  });
}

TEST(ParameterStore, gathering_ahead_stops_at_the_limit) {
  on_hosts(1, 2, [](const GatherGroupPtr& group) {
    Four four(group, 20);
    for (int i = 0; i < 3; ++i) four.pass({0, 1, 2, 3});
    EXPECT_EQ(four.store->stats().num_hits, 8);
    EXPECT_EQ(four.store->stats().peak_live_elements, 20);
    Four narrow(group, 5);
    for (int i = 0; i < 3; ++i) narrow.pass({0, 1, 2, 3});
    EXPECT_EQ(narrow.store->stats().num_hits, 0);
    EXPECT_EQ(narrow.store->stats().peak_live_elements, 10);
  });
}

TEST(ParameterStore, what_is_used_again_soon_is_not_let_go_of) {
  on_hosts(1, 2, [](const GatherGroupPtr& group) {
    Four four(group, 1000);
    four.pass({0, 1, 1, 0});
    EXPECT_EQ(four.store->stats().num_gathers, 4);
    four.pass({0, 1, 1, 0});
    EXPECT_EQ(four.store->stats().num_gathers, 6);
  });
}

TEST(ParameterStore, another_order_is_followed_from_the_next_pass_on) {
  on_hosts(1, 2, [](const GatherGroupPtr& group) {
    Four four(group, 1000);
    four.pass({0, 1, 2, 3});
    four.pass({0, 3, 1, 2});
    EXPECT_EQ(four.store->stats().num_deviations, 1);
    EXPECT_EQ(four.store->stats().num_hits, 1);
    four.pass({0, 3, 1, 2});
    EXPECT_EQ(four.store->stats().num_deviations, 1);
    EXPECT_EQ(four.store->stats().num_hits, 5);
  });
}

TEST(ParameterStore, a_pass_does_not_end_while_a_unit_is_held) {
  on_hosts(1, 2, [](const GatherGroupPtr& group) {
    Four four(group, 1000);
    four.store->begin_pass(0);
    four.store->hold({2});
    EXPECT_THROW(four.store->end_pass(), InternalError);
    four.store->release({2});
    four.store->end_pass();
  });
}

}  // namespace
}  // namespace smp::parameters
