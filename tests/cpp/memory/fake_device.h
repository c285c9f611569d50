#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

// Devices of PyTorch's kind for others (PrivateUse1) whose memory is the
// host's, with streams, events and a caching allocator: what is wrong about the
// device or the stream of a thread shows without a GPU. Tensors of them may be
// used with any operator; it runs on the CPU. One set of devices per process.
// Source of the idea: torch_openreg of PyTorch's own tests.

namespace smp::fake_device {

inline constexpr int kNumDevices = 4;

c10::Device device(int index);
/// Returns a stream that has no other user.
c10::Stream new_stream(int device_index);
/// Returns whether a stream comes from the pool, as those of copies do.
bool is_from_pool(int64_t stream_id);
/// Returns what a launcher of kernels would get as the handle of a stream.
void* handle_of(const c10::Stream& stream);

/// The use of an event. On CUDA it makes a context on the current device of the
/// thread, whichever stream is current.
inline constexpr const char* kUseOfEvent = "event";

/// Something that a thread asked of a device, and where the thread stood.
struct Use {
  /// An operator, "allocate", `kUseOfEvent`, or what `note` was told.
  std::string what;
  std::string thread;  ///< name of the thread
  int current_device;
  int64_t current_stream;  ///< of that device
  int home;                ///< device of the tensors; -1 where there are none
};

/// Starts over: no uses, nothing counted, eager.
void reset();
/// Records where the calling thread stands.
void note(const std::string& what, int home = -1);
std::vector<Use> uses();

/// Lazy streams only keep what is asked of them, so that the host runs ahead as
/// far as it likes, until `run` is called or a stream is waited for. Eager
/// ones, the default, do at once what is asked.
void set_lazy(bool lazy);
/// Asks the current stream of the current device for `kernel`.
void launch(std::function<void()> kernel);
/// Runs up to `most` things that were asked of a stream, until it has to wait
/// for another one. @return how many
int run(const c10::Stream& stream, int most = 1 << 30);
/// Runs everything, streams with higher ids first if `copies_first`.
void run_all(bool copies_first = false);

/// Sets the clock of the devices, in nanoseconds. The clock of the host is used
/// before that, and after `reset`. Events store when they fired.
void set_clock(std::function<int64_t()> clock);

/// Memory in use on all devices, as the host counts: memory that was freed may
/// go to the next tensor of that size although streams have not come to either.
int64_t bytes_in_use();
int64_t peak_bytes();

}  // namespace smp::fake_device
