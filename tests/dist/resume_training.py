"""Jobs that stop, and go on from their checkpoint on another layout."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from smp.model import engine_of
from smp.storage.flat_parameters import FlatParameters
from smp.storage.sharded import ShardedParameters
from tests.reference.split_families import VOCABULARY, make_split_family

CASE = "gpt2"  # its head is tied to its embedding
SAMPLES, LENGTH = 8, 5
BEFORE, AFTER = 2, 2


@dataclass(frozen=True)
class Job:
    """The layout of a job.

    Attributes:
        pp, tp, rdp, cp: sizes.
        sharding: "none", "state", or "sdp<degree>".
        precision: "fp64", "fp32", "fp16" or "bf16".
        dropout: whether the model drops elements at random.
        delayed: parameters are made when they are partitioned.
        state_dtype: storage of the moments by `FusedAdam`; "": torch's AdamW.
        masters: value of ``bf16_masters``.
        offloads_state: moments are in host memory, in pieces of two blocks.
    """

    pp: int
    tp: int
    rdp: int
    sharding: str = "none"
    precision: str = "fp64"
    dropout: bool = False
    delayed: bool = False
    state_dtype: str = ""
    masters: str = "fp32"
    offloads_state: bool = False
    cp: int = 1

    @property
    def world_size(self) -> int:
        return self.pp * self.tp * self.num_replicas

    @property
    def num_replicas(self) -> int:
        return self.rdp * self.cp

    @property
    def num_shards(self) -> int:
        if self.sharding.startswith("sdp"):
            return int(self.sharding[3:])
        return self.num_replicas if self.sharding == "state" else 1

    @property
    def is_legal(self) -> bool:
        if self.sharding == "state":
            return self.num_replicas > 1
        return self.num_replicas % self.num_shards == 0

    @property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "pipeline_parallel_degree": self.pp,
            "tensor_parallel_degree": self.tp,
            "context_parallel_degree": self.cp,
            "microbatches": 2,
            "prescaled_batch": True,
            "ddp": True,
        }
        if self.sharding == "state":
            config["shard_optimizer_state"] = True
        elif self.num_shards > 1:
            config |= {
                "sharded_data_parallel_degree": self.num_shards,
                "sdp_param_persistence_threshold": 0,
                "sdp_gradient_clipping": 1e9,
            }
        if self.precision in ("fp16", "bf16"):
            config[self.precision] = True
        if self.masters != "fp32":
            config["bf16_masters"] = self.masters
        if self.offloads_state:
            config["offload_optimizer_state"] = True
        return config

    def __str__(self) -> str:
        flags = f"-{self.state_dtype}-{self.masters}" if self.state_dtype else ""
        flags += "-offloaded" if self.offloads_state else ""
        flags += ("-dropout" if self.dropout else "") + ("-delayed" if self.delayed else "")
        flags += f"-cp{self.cp}" if self.cp > 1 else ""
        return f"pp{self.pp}-tp{self.tp}-rdp{self.rdp}-{self.sharding}-{self.precision}{flags}"


@dataclass
class State:
    """A whole job's tensors on the CPU, the same on every rank."""

    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    loss_scale: float


@dataclass
class Seen:
    """Records what one rank saw.

    Attributes:
        at: the state where it was saved, or as it was loaded.
        end: the state after all steps.
        losses: losses of all steps.
        facts: measured properties of the layout, see `facts_of`.
    """

    at: State | None = None
    end: State | None = None
    losses: list[float] = field(default_factory=list)
    content: Any = None
    facts: dict[str, Any] = field(default_factory=dict)


def make(job: Job, seed: int) -> tuple[Any, Any, Callable[[int], float]]:
    """Model, optimizer, and what trains one step on the batch that all ranks share."""
    import smp

    smp.init(job.config)
    torch.manual_seed(100)
    dtype = torch.float64 if job.precision == "fp64" else torch.float32
    late = smp.delay_param_initialization(job.delayed)
    with smp.tensor_parallelism(), late:
        plain = make_split_family(CASE, dtype, dropout=job.dropout)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.normal_(std=0.2, generator=generator)
    model = smp.DistributedModel(plain)
    options: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3}
    inner = (
        smp.optimizers.FusedAdam(_groups(model), state_dtype=job.state_dtype, **options)
        if job.state_dtype
        else torch.optim.AdamW(_groups(model), **options)
    )
    optimizer = smp.DistributedOptimizer(inner, **_scale(job))

    @smp.step
    def train_step(tokens: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=tokens, labels=tokens)["loss"]
        model.backward(loss)
        return loss

    def train(step: int) -> float:
        generator = torch.Generator().manual_seed(1000 + step)
        tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator)
        loss = train_step(tokens.chunk(job.rdp)[smp.rdp_rank()]).reduce_mean().item()
        optimizer.step()
        optimizer.zero_grad()
        for group in optimizer.param_groups:  # a schedule
            group["lr"] *= 0.5
        return loss

    return model, optimizer, train


def _groups(model: Any) -> list[dict[str, Any]]:
    """Two, as scripts make them."""
    named = list(model.named_parameters())
    plain = [p for name, p in named if name.endswith("bias")]
    return [
        {"params": [p for name, p in named if not name.endswith("bias")], "weight_decay": 0.1},
        {"params": plain, "weight_decay": 0.0, "betas": (0.8, 0.99)},
    ]


def _scale(job: Job) -> dict[str, Any]:
    # The first step overflows, the others do not.
    arguments = {"init_scale": 2.0**24, "scale_factor": 2.0**8, "scale_window": 100}
    if job.precision != "fp16":
        return {}
    return {"dynamic_loss_scale": True, "dynamic_loss_args": arguments}


def state_of(model: Any, optimizer: Any) -> State:
    """Everything, on every rank. Collective."""
    from smp.optim.state import to_cpu

    whole = model.state_dict()
    tensors = {name: value for name, value in whole.items() if isinstance(value, Tensor)}
    copied = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
    return State(copied, to_cpu(_cloned(optimizer.state_dict())), optimizer.loss_scale)


def _cloned(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _cloned(item) for key, item in value.items()}
    return [_cloned(item) for item in value] if isinstance(value, list) else value


def facts_of(job: Job, model: Any) -> dict[str, Any]:
    """Measures properties of this rank's layout."""
    import smp
    from smp.tensor_parallel import sharding

    local = list(model.local_parameters())
    return {
        "places": (smp.pp_rank(), smp.tp_rank(), smp.rdp_rank(), smp.cp_rank()),
        "local": sum(p.numel() for p in local),
        "split": sum(sharding.interval_of(p) is not None for p in local),
        "is_sharded": isinstance(engine_of(model).storage, ShardedParameters),
        "is_flat": isinstance(engine_of(model).storage, FlatParameters),
        "partition": model._decision.text if model._decision is not None else None,
    }


def train_and_save(rank: int, job: Job, folder: str) -> Seen:
    """Saves in the middle; what it does afterwards is what others have to do."""
    import smp

    model, optimizer, train = make(job, seed=1)
    seen = Seen()
    for step in range(BEFORE):
        seen.losses.append(train(step))
    seen.at = state_of(model, optimizer)
    smp.save_checkpoint(
        folder, tag=str(job), model=model, optimizer=optimizer, user_content={"steps": BEFORE}
    )
    for step in range(BEFORE, BEFORE + AFTER):
        seen.losses.append(train(step))
    seen.end = state_of(model, optimizer)
    seen.facts = facts_of(job, model)
    return seen if rank == 0 else Seen(facts=seen.facts)


def resume(rank: int, job: Job, folder: str, tag: str) -> Seen:
    """Goes on with another model, whose weights are others."""
    import smp

    model, optimizer, train = make(job, seed=2)
    seen = Seen()
    seen.content = smp.resume_from_checkpoint(folder, tag=tag)

    def look(*_: Any) -> None:
        seen.at = state_of(model, optimizer)

    model.register_post_partition_hook(look)
    for step in range(BEFORE, BEFORE + AFTER):
        seen.losses.append(train(step))
    seen.end = state_of(model, optimizer)
    seen.facts = facts_of(job, model)
    return seen if rank == 0 else Seen(facts=seen.facts)


def save_many(rank: int, jobs: list[Job], folder: str) -> list[Seen]:
    """`train_and_save`, one job after the other."""
    return [_alone(job, train_and_save, rank, job, folder) for job in jobs]


def resume_many(rank: int, jobs: list[tuple[Job, str]], folder: str) -> list[Seen]:
    """`resume`, one job after the other."""
    return [
        _alone(job, lambda job=job, tag=tag: resume(rank, job, folder, tag)) for job, tag in jobs
    ]


def _alone(job: Job, run: Callable[..., Seen], *args: Any) -> Seen:
    import smp
    from tests.dist.small_pieces import small_pieces

    try:
        with small_pieces() if job.offloads_state else nullcontext([]) as pieces:
            seen = run(*args)
        seen.facts["pieces"] = pieces
        return seen
    except BaseException as error:
        error.add_note(f"while running {job}")
        raise
    finally:
        smp.shutdown()
