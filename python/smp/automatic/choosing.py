"""Chooses a layout for devices that were looked at; or says what is nearest to fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from smp.automatic.looking import Seen
from smp.commands.ending import BadUse
from smp.commands.models import LoadedModel, quiet_transformers
from smp.commands.plan import facts, layout_texts, nothing_fits, profiled
from smp.commands.printing import bytes_text, count_text
from smp.config.schema import Config, normalize
from smp.modules import packed
from smp.planning.layout import KEYS
from smp.planning.search import Found, Job, Plan, search

_MORE_DEVICES = (2, 4, 8, 16)  # times those of the job
_FEWER_SAMPLES = (2, 4, 8, 16)  # parts of the batch
_UNEVEN = {"device_speeds", "partition_memory_limit"}  # values by rank


@dataclass(frozen=True)
class Request:
    """A training run for which a layout is wanted.

    Attributes:
        batch: samples of a step, over all ranks.
        seq: tokens of a sample; None: the model's default.
        precision: "fp32", "bf16" or "fp16".
        config: keys of the configuration that the user has set.
        memory_bytes: memory of a rank that counts; None: the free memory.
    """

    batch: int
    seq: int | None
    precision: str
    config: Mapping[str, Any]
    memory_bytes: int | None = None

    def job(self, seen: Seen) -> Callable[[Any, Any], Job]:
        """Returns a function of the traced model and of its split form that describes the search.

        Raises:
            ValueError: a key of the configuration is wrong, or is not the user's to set.
        """
        given = {**normalize(self.config).values, "ddp": True}
        Config.of_checked(given)
        given.pop("ddp")
        if given.pop("fp16", False) or given.pop("bf16", False):
            raise ValueError("config= sets fp16 or bf16; give precision= instead")
        if uneven := _UNEVEN & given.keys():
            raise ValueError(
                f"config= sets {sorted(uneven)[0]}, and smp.auto counts each device as the weakest "
                "one; give memory=, or call smp.init with a configuration of your own"
            )
        hardware = seen.hardware(self.precision)
        fixed = {key: given.pop(key) for key in list(given) if key in KEYS}

        def make(whole: Any, split: Any) -> Job:
            return Job(
                whole,
                hardware,
                len(seen.ranks),
                seen.per_host,
                self.memory_bytes or hardware.memory_bytes,
                self.batch,
                self.precision,
                split,
                given,
                masters=fixed.get("bf16_masters", "fp32"),
                offloads_state=fixed.get("offload_optimizer_state", False),
                drops_gradients=fixed.get("update_in_backward", False),
                fixed=fixed,
                shares_sequences="context_parallel_degree" in fixed,
            )

        return make


@dataclass(frozen=True)
class Choice:
    """A plan in the form of a file, from which a run is made without looking.

    Attributes:
        model: name of the model.
        elements: parameter elements.
        num_ranks: number of ranks.
        batch, seq, precision: values of the request.
        plan: facts of the plan, as `smp plan --json` prints them.
        lines: reasons in words.
    """

    model: str
    elements: float
    num_ranks: int
    batch: int
    seq: int | None
    precision: str
    plan: dict[str, Any]
    lines: list[str]

    @property
    def config(self) -> dict[str, Any]:
        """Returns the configuration of `smp.init`."""
        return dict(self.plan["config"])

    @property
    def checkpoints(self) -> list[str]:
        """Returns the names of layers that are checkpointed."""
        return list(self.plan["checkpoint_layers"])

    def peak_bytes(self, pp_rank: int) -> float:
        """Returns the predicted peak of a rank."""
        return float(self.plan["ranks"][pp_rank]["peak"])


def choose(
    make_model: Callable[[], LoadedModel], request: Request, seen: Seen, delays: bool
) -> Choice:
    """Searches the fastest layout that fits into each device. Not collective.

    Args:
        make_model: function that makes the model on the meta device, each time a new one.
        request: the run.
        seen: figures of the devices.
        delays: parameters are allocated where they are needed.

    Raises:
        ValueError: nothing fits; the text names the nearest that does. Or there is no such model,
            or the configuration is wrong.
    """
    make_job = request.job(seen)
    hardware = seen.hardware(request.precision)
    try:
        with (
            quiet_transformers(),
            profiled(
                make_model, request.seq, request.precision, hardware, make_job(None, None).keys
            ) as (loaded, whole, split),
        ):
            job = make_job(whole, split)
            found = search(job)
            if not found.plans:
                raise ValueError(_refusal(job, found))
    except BadUse as error:
        raise ValueError(str(error).replace("--seq", "seq=")) from None
    chosen = facts(job, found.plans[0])
    config = chosen["config"]
    if delays:
        config["delayed_parameter_initialization"] = True
    if config.get("sharded_data_parallel_degree", 1) > 1:
        # The default clips, and no other layout does.
        config.setdefault("sdp_gradient_clipping", 0.0)
    return Choice(
        loaded.name,
        _num_elements(loaded),
        job.num_ranks,
        request.batch,
        request.seq,
        request.precision,
        chosen,
        _reasons(loaded, job, found, seen),
    )


def _refusal(job: Job, found: Found) -> str:
    """Returns why there is no plan, and what is nearest that fits."""
    if found.tried == 0 and job.fixed:
        return f"no layout has the keys {dict(job.fixed)} of config=; leave some of them out"
    text = nothing_fits(job, found)
    if found.nearest is None:
        return text
    others = [
        *(
            (f"with batch={job.samples // parts}", replace(job, samples=job.samples // parts))
            for parts in _FEWER_SAMPLES
            if job.samples % parts == 0
        ),
        *(
            (f"on {job.num_ranks * times} such devices", _on_more(job, times))
            for times in _MORE_DEVICES
        ),
    ]
    for words, other in others:
        plans = search(other).plans
        if plans:
            need = bytes_text(plans[0].peak_bytes)
            return f"{text}. The nearest that fits: {words}, {plans[0].layout.text()}, {need}"
    return f"{text}. A smaller batch or {_MORE_DEVICES[-1]} times as many devices do not help"


def _on_more(job: Job, times: int) -> Job:
    return replace(job, num_ranks=job.num_ranks * times, samples=job.samples * times)


def _reasons(loaded: LoadedModel, job: Job, found: Found, seen: Seen) -> list[str]:
    """Returns four lines: the model, the devices, the layout with its reason, and the memory."""
    plan, hardware = found.plans[0], job.hardware
    link = (
        f", {seen.inside.bytes_per_s / 1e9:.3g} GB/s and {1e6 * seen.inside.latency_s:.0f} us "
        "between two"
        if seen.inside
        else ""
    )
    hosts = len(seen.hosts)
    held = max(plan.held, key=lambda rank: rank.peak)
    state = held.parameters + held.gradients + held.optimizer
    return [
        f"{loaded.trained}, {count_text(_num_elements(loaded))} parameters, {job.samples} x "
        f"{job.profile.tokens} tokens a step, {job.precision}",
        f"{job.num_ranks} x {hardware.name} on {hosts} host{'s' if hosts > 1 else ''}: "
        f"{bytes_text(hardware.memory_bytes)} free, {hardware.rate(job.precision) / 1e9:.3g} "
        f"GFLOP/s each{link} (measured)",
        f"{plan.layout.text()}: {_why(found)}",
        f"{bytes_text(plan.peak_bytes)} of {bytes_text(job.usable_bytes)} on the fullest rank: "
        f"{bytes_text(state)} parameters, gradients and optimizer, {bytes_text(held.activations)} "
        "activations",
    ]


def _why(found: Found) -> str:
    """Returns why the first plan was chosen: its time, and the best plan of other degrees."""
    first = found.plans[0]
    text = (
        f"{first.time.total:.3g} s a step (predicted), the fastest of {found.fitting} layouts that "
        f"fit, of {found.tried}"
    )
    other = next((plan for plan in found.plans if _degrees(plan) != _degrees(first)), None)
    if other is None:
        return text
    words = layout_texts([other.layout])[0]
    return f"{text}; next {words}: {other.time.total:.3g} s"


def _num_elements(loaded: LoadedModel) -> float:
    """Returns parameter elements; those of quantized weights count as in full precision."""
    return sum(map(packed.num_elements, loaded.module.parameters()))


def _degrees(plan: Plan) -> tuple[int, int, int]:
    return plan.layout.pp, plan.layout.tp, plan.layout.rdp
