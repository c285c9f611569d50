#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>

// Functions that the files of the fake device share.

namespace smp::fake_device {

/// Asks a stream for something; at once done where streams are eager.
void ask(const c10::Stream& stream, std::function<void()> work);
bool is_empty(const c10::Stream& stream);

void record_event(void** event, const c10::Stream& stream);
void wait_for_event(void* event, const c10::Stream& stream);
bool is_fired(void* event);
int64_t fired_ns(void* event);
void drop_event(void* event);

/// The calling thread's.
c10::Stream current_stream_of(c10::Device device);
at::Generator new_generator();

}  // namespace smp::fake_device
