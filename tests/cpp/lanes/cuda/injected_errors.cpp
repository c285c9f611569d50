#include "tests/cpp/lanes/cuda/injected_errors.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <string>

#include "csrc/common/check.h"
#include "tests/cpp/cuda_runtime/fake_cuda.h"

namespace smp::lanes {
namespace {

// A number that a rank tells the test.
class SharedNumber {
 public:
  SharedNumber()
      : number_(static_cast<int*>(::mmap(nullptr, sizeof(int),
                                         PROT_READ | PROT_WRITE,
                                         MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {}
  ~SharedNumber() { ::munmap(number_, sizeof(int)); }
  SharedNumber(const SharedNumber&) = delete;
  SharedNumber& operator=(const SharedNumber&) = delete;

  int& get() const { return *number_; }

 private:
  int* const number_;
};

struct Injected {
  int call = 0;  // 0: none
  cudaError_t error = cudaErrorMemoryAllocation;
  bool is_sticky = false;
};

bool is_release(const std::string& call) {
  return call == "cudaEventDestroy" || call == "cudaIpcCloseMemHandle" ||
         call == "cudaFreeHost" || call == "cudaFree";
}

// Rank 0, one of whose calls fails: it raises that error, or chooses another
// lane for that reason, and releases what it can.
void run_with_error(Links& links, const CudaRankOptions& options,
                    const Injected& injected, int& num_calls) {
  const c10::Device device = begin_rank(links, options);
  fake_cuda::fail_call(injected.call, injected.error, injected.is_sticky);
  std::string text;
  bool is_over = false;
  try {
    CudaRank rank(links, options, device);
    text = rank.table().choices()[0][1].reason;
    try {
      exchange_tensors(rank, 4, 1);
    } catch (const std::exception&) {
      // Before the end of the lanes, whose queries of events clear errors.
      if (!injected.is_sticky) {
        EXPECT_EQ(cudaGetLastError(), cudaSuccess);
      }
      throw;
    }
    links.exchange("all have come");
    rank.came.clear();
    is_over = true;
    num_calls = fake_cuda::num_calls();
  } catch (const std::exception& error) {
    text = error.what();
  }
  const std::string failed = fake_cuda::failed_call();
  SCOPED_TRACE(failed + ": " + text);
  // Not reached, or in the end of the lanes, which logs it and keeps all that
  // the device might use.
  const bool is_in_run = !failed.empty() && injected.call <= num_calls;
  if (!is_over || (is_in_run && !is_release(failed))) {
    EXPECT_NE(text.find(cudaGetErrorString(injected.error)), std::string::npos)
        << "an error that nobody has seen";
  }
  if (!injected.is_sticky && is_in_run) expect_released(device, options);
  if (is_over) links.say_goodbye();
}

// Rank 1, whose calls succeed.
void run_beside_error(Links& links, const CudaRankOptions& options) {
  const c10::Device device = begin_rank(links, options);
  bool is_over = false;
  try {
    CudaRank rank(links, options, device);
    exchange_tensors(rank, 4, 1);
    links.exchange("all have come");
    is_over = true;
  } catch (const PeerFailure& failure) {
    EXPECT_NE(std::string(failure.what()).find("global_rank 0"),
              std::string::npos);
  }
  if (is_over) links.say_goodbye();
}

bool all_good(const std::vector<RankEnd>& ends) {
  return std::all_of(ends.begin(), ends.end(),
                     [](const RankEnd& end) { return end.is_good(); });
}

}  // namespace

std::vector<RankEnd> run_with_injected_errors(const CudaRankOptions& options,
                                              bool is_sticky, int num_samples) {
  constexpr int kNumAtEnd = 10;  // calls of the end of the lanes
  const SharedNumber num_calls;
  const auto run = [&](const Injected& injected) {
    const fake_cuda::Machine machine;
    return run_ranks(2, [&](Links& links) {
      SCOPED_TRACE(detail::concat("call ", injected.call));
      if (links.rank() == 0) {
        run_with_error(links, options, injected, num_calls.get());
      } else {
        run_beside_error(links, options);
      }
    });
  };
  std::vector<RankEnd> ends = run({});
  const int last = num_calls.get() + kNumAtEnd;
  const int step = num_samples == 0 ? 1 : std::max(1, last / num_samples);
  for (int call = 1; call <= last && all_good(ends); call += step) {
    num_calls.get() = last;  // unless the exchange ends
    ends = run({call,
                is_sticky ? cudaErrorIllegalAddress : cudaErrorMemoryAllocation,
                is_sticky});
  }
  return ends;
}

}  // namespace smp::lanes
