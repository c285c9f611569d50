"""Copies sources of csrc/lanes with faults in them, each behind a switch.

Usage: mutations.py <folder of csrc/lanes> <folder to write>
Writes ``<file>.cpp`` for each file of ``MUTATIONS`` and ``mutation_list.h`` with all names. A
mutation whose text is not in its file exactly once is marked as stale, and a test fails.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.mutation import Mutation, mutate, without


def before(statement: str, added: str) -> tuple[str, str]:
    """Returns the change that runs another statement first."""
    changed = f"if (@) {added} {statement}"
    return statement, f"{{ {changed} }}" if statement.endswith(";") else changed


_CURRENT = "c10::impl::VirtualGuardImpl(device_.type()).getDevice()"
_GUARD = "const c10::DeviceGuard guard(device_);"
_WRONG_GUARD = f"const c10::DeviceGuard guard(@ ? {_CURRENT} : device_);"
_RECORD_WRITTEN = "queue.record(*written_[slot->index]);"
_RECORD_READ = "queue.record(*peer.read_here[descriptor.slot]);"
_RECEIPT = "receipts_(src, {descriptor.lane, descriptor.slot, descriptor.sequence});"
_INTO_SLOT = "queue.copy(ring_.get() + slot->index * options_.slot_bytes,"
_OUT_OF_SLOT = "queue.copy(static_cast<uint8_t*>(result.data.mutable_data_ptr()),"
_WAIT_WRITTEN = "queue.wait(*peer.written[descriptor.slot]);"

MUTATIONS = (
    Mutation("post_follows_no_caller", "ipc_lane", (without("queue.follow_caller();"),)),
    Mutation(
        "post_waits_for_no_reader",
        "ipc_lane",
        (without("queue.wait(*peer_of(reader).read_by_peer[slot->index]);"),),
    ),
    Mutation("post_records_nothing", "ipc_lane", (without(_RECORD_WRITTEN),)),
    Mutation(
        "post_records_before_the_copy",
        "ipc_lane",
        (without(_RECORD_WRITTEN), before(_INTO_SLOT, _RECORD_WRITTEN)),
    ),
    Mutation("post_keeps_no_tensor", "ipc_lane", (without("queue.keep(data);"),)),
    Mutation(
        "post_takes_what_may_be_written_to",
        "ipc_lane",
        (("own_plain_tensor(source, is_stable);", "own_plain_tensor(source, is_stable || @);"),),
    ),
    Mutation("take_waits_for_nothing", "ipc_lane", (without(_WAIT_WRITTEN),)),
    Mutation("take_records_nothing", "ipc_lane", (without(_RECORD_READ),)),
    Mutation(
        "take_records_before_the_copy",
        "ipc_lane",
        (without(_RECORD_READ), before(_OUT_OF_SLOT, _RECORD_READ)),
    ),
    Mutation(
        "take_sends_the_receipt_first",
        "ipc_lane",
        (without(_RECEIPT), before(_WAIT_WRITTEN, _RECEIPT)),
    ),
    Mutation(
        "take_keeps_no_tensor",
        "ipc_lane",
        (without("queue.keep(result.data);"),),
        is_found=False,
        why_not="the tensor belongs to the stream of the copy already",
    ),
    Mutation(
        "memory_is_not_closed",
        "cuda_copies",
        (without("clear_error(cudaIpcCloseMemHandle(opened));"),),
    ),
    Mutation("events_stay", "cuda_copies", (without("clear_error(cudaEventDestroy(event_));"),)),
    Mutation(
        "put_does_not_wait",
        "cuda_copies",
        (without('check_cuda(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");'),),
    ),
    Mutation(
        "rings_are_not_reused",
        "cuda_copies",
        (without("free_memory().emplace(std::pair{device, num_bytes}, memory);"),),
    ),
    Mutation(
        "events_are_of_the_current_device",
        "cuda_copies",
        (
            (
                f"SharedEventPtr new_event() override {{\n    {_GUARD}",
                f"SharedEventPtr new_event() override {{\n    {_WRONG_GUARD}",
            ),
        ),
    ),
    Mutation(
        "rings_are_of_the_current_device",
        "cuda_copies",
        (
            (
                f"DeviceMemory allocate(int64_t num_bytes) override {{\n    {_GUARD}",
                f"DeviceMemory allocate(int64_t num_bytes) override {{\n    {_WRONG_GUARD}",
            ),
        ),
    ),
    Mutation(
        "events_are_of_one_process",
        "cuda_copies",
        (("cudaEventInterprocess | cudaEventDisableTiming", "(@ ? 0u : 4u) | 2u"),),
    ),
    Mutation(
        "errors_are_not_cleared",
        "cuda_copies",
        (("if (status != cudaSuccess) (void)", "if (!@ && status != cudaSuccess) (void)"),),
    ),
    Mutation(
        "group_copies_keep_no_tensor",
        "group_copies",
        (("tensor_(std::move(tensor)) {}", "tensor_(@ ? at::Tensor() : std::move(tensor)) {}"),),
    ),
    Mutation("host_copies_keep_no_tensor", "host_lane", (without("to_host_.keep(data);"),)),
    Mutation(
        "host_messages_leave_at_once",
        "host_lane",
        (
            (
                "posted.end = posted.payload.mark;",
                "posted.end = posted.payload.mark; if (@) posted.payload.mark = Mark::none();",
            ),
        ),
    ),
    Mutation("sends_follow_no_producer", "nccl_lane", (without("sending_.wait(sending.made);"),)),
    Mutation(
        "sends_take_what_may_be_written_to",
        "nccl_lane",
        (("own_plain_tensor(source, is_stable);", "own_plain_tensor(source, is_stable || @);"),),
    ),
    Mutation(
        "channels_have_several_copies",
        "nccl_lane",
        (("if (channels_[channel].end", "if (@ || channels_[channel].end"),),
    ),
    Mutation("sends_end_no_turn", "nccl_lane", (without("turns_.sent();"),)),
    Mutation(
        "senders_send_no_receipt",
        "nccl_lane",
        (("if (channel.dst < global_rank_) {", "if (!@ && channel.dst < global_rank_) {"),),
    ),
)


def main(folder: Path, written: Path) -> None:
    lines = []
    sources = {name: (folder / f"{name}.cpp").read_text() for name in {m.file for m in MUTATIONS}}
    for mutation in MUTATIONS:
        switch = f'::smp::lanes::is_mutated("{mutation.name}")'
        mutated = mutate(sources[mutation.file], mutation, switch)
        sources[mutation.file] = mutated or sources[mutation.file]
        flags = f"{str(mutation.is_found).lower()}, {str(mutated is None).lower()}"
        lines.append(f'    {{"{mutation.name}", {flags}}},\n')
    written.mkdir(parents=True, exist_ok=True)
    for name, source in sources.items():
        text = f'#include "tests/cpp/lanes/cuda/mutants/mutation.h"\n{source}'
        (written / f"{name}.cpp").write_text(text)
    (written / "mutation_list.h").write_text("".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
