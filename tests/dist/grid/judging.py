"""A comparison of the ranks' records of a cell with those of one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.dist.grid.cells import LOSS_SCALE, Cell
from tests.dist.grid.training import MICROBATCHES, STEPS, GridRecord, Part, Parts
from tests.dist.split_training import whole_of
from tests.reference.half_precision import HalfRecord
from tests.reference.mixed_precision import CASE, train_mixed
from tests.reference.tolerances import MIXED_TOLERANCE, distance, relative_difference

NUM_BLOCKS = 4


def check(cell: Cell, records: Sequence[GridRecord]) -> None:
    """Everything that a cell promises.

    Raises:
        AssertionError: names the cell, the rank or parameter, and both values.
    """
    scale = LOSS_SCALE if cell.precision == "fp16" else 1.0
    expected = train_mixed(cell.dtype, cell.tp * cell.dp, MICROBATCHES, STEPS, scale, cell.clipping)
    check_happened(cell, records)
    tolerance = MIXED_TOLERANCE[cell.dtype]
    for record in records:
        _check_losses(cell, record, expected, tolerance.losses)
        for step, (norm, wanted) in enumerate(zip(record.norms, expected.norms, strict=True)):
            assert abs(norm / wanted - 1) <= tolerance.norms, (
                f"{_where(cell, record)}: norm of step {step} is {norm}, not {wanted}"
            )
    worst = 0.0
    for step in range(STEPS):
        grads = whole(cell, [record.grads[step] for record in records], records)
        reference = expected.grads[step]
        _check_names(cell, grads, reference)
        floor = 0.01 * max(ref.norm().item() for ref in reference.values())
        for name, ref in reference.items():
            difference = distance(grads[name], ref, floor)
            worst = max(worst, difference)
            assert difference <= tolerance.grads, (
                f"{cell}: gradient of {name} in step {step} differs by {difference:.1e}"
            )
    masters = whole(cell, [record.masters for record in records], records)
    change = _distance_of_changes(cell, masters, expected)
    assert change <= tolerance.changes, f"{cell}: changes of parameters differ by {change:.1e}"
    _check_model_follows(cell, records)
    print(f"{cell}: gradients {worst:.1e}, changes {change:.1e}")


def _where(cell: Cell, record: GridRecord) -> str:
    return f"{cell}: pp {record.pp_rank} tp {record.tp_rank} rdp {record.rdp_rank}"


# ---- against one process ---------------------------------------------------------------


def _check_losses(cell: Cell, record: GridRecord, expected: HalfRecord, tolerance: float) -> None:
    for step in range(STEPS):
        losses = torch.tensor(record.losses[step], dtype=torch.float64)
        wanted = torch.tensor(expected.losses[step][record.batch_idx], dtype=torch.float64)
        difference = relative_difference(losses, wanted)
        assert difference <= tolerance, (
            f"{_where(cell, record)}: losses of step {step} are {losses.tolist()}, "
            f"not {wanted.tolist()}"
        )


def _check_names(cell: Cell, actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    missing = set(expected) - set(actual)
    assert not missing, f"{cell}: nobody has {sorted(missing)}"


def _distance_of_changes(cell: Cell, masters: dict[str, Tensor], expected: HalfRecord) -> float:
    """Computes how far all parameters' changes over the training are from the expected ones."""
    _check_names(cell, masters, expected.masters)
    names = list(expected.masters)
    own = [masters[name].double() - expected.initial[name].double() for name in names]
    wanted = [expected.masters[name].double() - expected.initial[name].double() for name in names]
    return distance(
        torch.cat([t.reshape(-1) for t in own]), torch.cat([t.reshape(-1) for t in wanted])
    )


# ---- putting together ------------------------------------------------------------------


def whole(cell: Cell, parts: Sequence[Parts], records: Sequence[GridRecord]) -> dict[str, Tensor]:
    """Joins whole tensors under the names of the Hugging Face model.

    Copies must be equal bit by bit.

    Args:
        cell: the cell that ran.
        parts, records: parts of tensors, and records, one of each per rank.
    """
    from smp.tensor_parallel import partial

    copies = []
    for first in range(0, cell.dp, cell.num_shards):
        group = range(first, first + cell.num_shards)  # rdp ranks that hold one copy together
        ranks = []
        for place in sorted({(record.pp_rank, record.tp_rank) for record in records}):
            shards = [
                part
                for part, record in zip(parts, records, strict=True)
                if (record.pp_rank, record.tp_rank) == place and record.rdp_rank in group
            ]
            joined, slices = join_shards(shards)
            ranks.append({**joined, partial.PARTIAL_MARK: True, partial.SHARDS_MARK: slices})
        copies.append(whole_of(CASE, ranks))
    for copy in copies[1:]:
        assert set(copy) == set(copies[0])
        for name, tensor in copy.items():
            assert torch.equal(tensor, copies[0][name]), f"{cell}: replicas differ in {name}"
    return copies[0]


def join_shards(shards: Sequence[Parts]) -> tuple[dict[str, Tensor], dict[str, tuple[int, ...]]]:
    """Joins the parts of a shard group's ranks, and collects the parts' tensor-parallel slices."""
    joined: dict[str, Tensor] = {}
    slices: dict[str, tuple[int, ...]] = {}
    for name in dict.fromkeys(name for shard in shards for name in shard):
        parts = sorted((s[name] for s in shards if name in s), key=lambda part: part.begin)
        joined[name] = _join(name, [part for part in parts if part.values.numel()])
        if parts[0].slice is not None:
            slices[name] = parts[0].slice
    return joined, slices


def _join(name: str, parts: Sequence[Part]) -> Tensor:
    end = 0
    for part in parts:
        assert part.begin == end, f"{name}: elements from {end} on are held by nobody or twice"
        end += part.values.numel()
    shape = torch.Size(parts[0].shape)
    assert end == shape.numel(), f"{name}: {end} of {shape.numel()} elements are held"
    return torch.cat([part.values for part in parts]).view(shape)


# ---- that it happened ------------------------------------------------------------------


def _check_model_follows(cell: Cell, records: Sequence[GridRecord]) -> None:
    """The model computes with the masters, rounded: every rank, every element."""
    for place in sorted({(record.pp_rank, record.tp_rank) for record in records}):
        group = [r for r in records if (r.pp_rank, r.tp_rank) == place]
        masters, _ = join_shards([r.masters for r in group[: cell.num_shards]])
        rounded = {name: master.to(cell.dtype) for name, master in masters.items()}
        if cell.dtype != torch.float32:
            more = sum(not torch.equal(rounded[n].float(), masters[n]) for n in masters)
            assert more > len(masters) / 2, f"{cell}: masters hold no more than 16 bits"
        for record in group:
            for name, part in record.model.items():
                end = part.begin + part.values.numel()
                wanted = rounded[name].reshape(-1)[part.begin : end]
                assert torch.equal(part.values, wanted), (
                    f"{_where(cell, record)}: {name} is not its rounded master"
                )


def check_happened(cell: Cell, records: Sequence[GridRecord]) -> None:
    """Refuses a vacuous pass: the ranks did what the cell's name says."""
    assert len(records) == cell.world_size
    assert len({(r.pp_rank, r.tp_rank, r.rdp_rank) for r in records}) == cell.world_size
    times = 1 if cell.checkpointing == "none" else 2  # that a block is computed
    for record in records:
        where, facts = _where(cell, record), record.facts
        for step, unchanged in enumerate(record.unchanged):
            assert not unchanged, f"{where}: step {step} left {unchanged} as they were"
        assert facts["model dtypes"] == {cell.dtype}, f"{where}: {facts}"
        assert facts["master dtypes"] == {torch.float32}, f"{where}: {facts}"
        assert facts.get("overflows", [False]) == [False] * len(facts.get("overflows", [False]))
        assert cell.tp == 1 or facts["split"] >= 4, f"{where}: {facts['split']} are split"
        share = facts["held"] * cell.num_shards / facts["local"]
        assert 0.9 < share < 1.1, f"{where}: holds {facts['held']} of {facts['local']} elements"
        for name, (held, numel, shape) in facts.get("shards", {}).items():
            assert held == -(-numel // 2) and torch.Size(shape).numel() == numel, (
                f"{where}: {name} {shape}: {held} of {numel} elements"
            )
        if cell.clipping is not None:
            assert min(record.norms) > cell.clipping, f"{where}: nothing was clipped"
            for clipped, norm in zip(facts["clipped_norms"], record.norms, strict=True):
                assert abs(clipped / norm - 1) < 1e-5, f"{where}: clipped by {clipped}, not {norm}"
    for place in {(record.tp_rank, record.rdp_rank) for record in records}:
        pipeline = [r for r in records if (r.tp_rank, r.rdp_rank) == place]
        for step in range(1, STEPS):  # the first one also traces
            forwards = sum(record.forwards[step] for record in pipeline)
            assert forwards == NUM_BLOCKS * MICROBATCHES * times, (
                f"{cell}: {forwards} forwards of blocks in step {step}"
            )
        if cell.pp > 1:
            assert all(record.facts["local"] for record in pipeline)
            calls = sum(record.facts["remote_calls"] for record in pipeline)
            assert calls >= STEPS * MICROBATCHES, f"{cell}: only {calls} remote calls"
    if cell.offload:
        _check_offload(cell, records)


def _check_offload(cell: Cell, records: Sequence[GridRecord]) -> None:
    for place in {(record.tp_rank, record.rdp_rank) for record in records}:
        stats = [
            record.facts["offload"]
            for record in records
            if (record.tp_rank, record.rdp_rank) == place
        ]
        assert sum(stat["bytes_offloaded"] for stat in stats) > 0, f"{cell}: {stats}"
        assert all(stat["slots_in_use"] == 0 for stat in stats), f"{cell}: {stats}"
        if cell.checkpointing == "none":
            continue
        num_checkpoints = sum(stat["checkpoints"] for stat in stats)
        per_pass = {"each": NUM_BLOCKS, "group_2": NUM_BLOCKS / 2}[cell.checkpointing]
        # Groups end where partitions do, hence there may be one more.
        more = cell.pp - 1 if cell.checkpointing == "group_2" else 0
        passes = STEPS * MICROBATCHES
        assert per_pass * passes <= num_checkpoints <= (per_pass + more) * passes, (
            f"{cell}: {num_checkpoints} checkpoints"
        )
