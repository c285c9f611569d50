"""Trains small models on ranks of the late device, or of the CPU, for the same bits on both."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.dist.small_pieces import small_pieces
from tests.reference.expert_families import build_experts, make_expert_batch

WIDTH, VOCABULARY, LENGTH, SAMPLES = 16, 32, 6, 8
#: With these, activations of a microbatch have 1 MiB: they are large enough for lanes between
#: devices, and to be offloaded.
LARGE_WIDTH, LARGE_LENGTH, LARGE_SAMPLES = 64, 65, 256
#: Seconds for which each stream of a script is held back, twice a step.
HELD_S = 0.03


class Block(nn.Module):
    """A residual block with a norm, products, a shape that depends on no data, and dropout."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        if shift is not None:
            x = x + shift
        inner = torch.nn.functional.gelu(self.up(self.norm(x)), approximate="tanh")
        return x + self.dropout(self.down(inner))


class BlockWithShift(nn.Module):
    """A block that returns a buffer too, and writes to it when it is called again."""

    shift: Tensor

    def __init__(self, block: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.block = block
        self.register_buffer("shift", torch.zeros(shape))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        torch.mul(x.detach(), 0.5, out=self.shift)
        return self.block(x), self.shift


class Net(nn.Module):
    """An embedding, four blocks and a head that returns the mean loss.

    With a shape the second and the last block are each a `BlockWithShift` with such a buffer, which
    the next block, or this module, adds to activations.
    """

    def __init__(self, width: int, dropout: float, shift: tuple[int, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width, dropout) for _ in range(4))
        if shift:
            for i in (1, 3):
                self.layers[i] = BlockWithShift(self.layers[i], shift)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        shift: Tensor | None = None
        for layer in self.layers:
            found = layer(x) if shift is None else layer(x, shift)
            x, shift = found if isinstance(found, tuple) else (found, None)
        if shift is not None:
            x = x + shift
        return nn.functional.cross_entropy(
            self.head(x).flatten(0, 1).float(), tokens[:, 1:].flatten()
        )


@dataclass(frozen=True)
class Layout:
    """A configuration, and what the script does besides.

    Attributes:
        config: keys of `smp.init`.
        dropout: probability of dropout in each block.
        checkpointed: whether blocks are checkpointed.
        optimizer: "adam" or "lamb" of smp (fused), or "sgd" of PyTorch.
        clips: whether gradients are clipped by their norm.
        resumes: whether a checkpoint is saved and loaded after the first step.
        has_experts: whether the model is a Mixtral, whose experts are spread over the ranks.
        scales: whether the loss is scaled by `smp.amp.GradScaler`.
        is_large: whether activations are large enough for lanes between devices, and to be
            offloaded.
        has_own_stream: whether the script trains inside of a stream of its own.
        writes: whether blocks write to buffers that another rank has got.
        compiles: whether the late device is asked to compile blocks, for which it has no compiler.
        num_hosts: number of hosts that the ranks take themselves to be on.
        world_size: number of ranks.
    """

    config: tuple[tuple[str, Any], ...] = ()
    dropout: float = 0.0
    checkpointed: bool = False
    optimizer: str = "adam"
    clips: bool = False
    resumes: bool = False
    has_experts: bool = False
    scales: bool = False
    is_large: bool = False
    has_own_stream: bool = False
    writes: bool = False
    compiles: bool = False
    num_hosts: int = 1
    world_size: int = 2

    @property
    def is_automatic(self) -> bool:
        """Returns whether the library chooses the ranks of modules, for which devices count."""
        return bool(dict(self.config).get("auto_partition"))

    @property
    def offloads(self) -> bool:
        """Returns whether activations are copied to the host."""
        return bool(dict(self.config).get("offload_activations"))

    @property
    def offloads_state(self) -> bool:
        """Returns whether moments are in host memory; then in small pieces."""
        return bool(dict(self.config).get("offload_optimizer_state"))

    @property
    def drops_gradients(self) -> bool:
        """Returns whether gradients are applied in the backward."""
        return bool(dict(self.config).get("update_in_backward"))

    @property
    def is_sharded(self) -> bool:
        """Returns whether ranks have parts of gradients only, which scripts do not see."""
        return any("shard" in key for key, _ in self.config)


@dataclass
class Trained:
    """The numbers of one rank, on the CPU.

    Attributes:
        losses: losses of microbatches, by step.
        gradients: gradients after the last step, by name, of parameters that this rank has.
        parameters: values of the whole model after the last step, by name.
        lanes: lanes of all pairs of ranks.
        copied_bytes: bytes of tensors that lanes have taken from this rank.
        message_bytes: bytes of messages of this rank, with what the host lane carries.
        num_offloaded: number of activations that were copied to the host.
        pieces: number of pieces of each update with moments in host memory.
        late: numbers of calls that ran late, by operator; empty on the CPU.
        device: device of the parameters.
    """

    losses: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    lanes: set[str] = field(default_factory=set)
    copied_bytes: int = 0
    message_bytes: int = 0
    num_offloaded: int = 0
    pieces: list[int] = field(default_factory=list)
    late: dict[str, int] = field(default_factory=dict)
    device: str = ""


def tokens_of(step: int, replica: int, is_large: bool) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + replica)
    shape = (LARGE_SAMPLES, LARGE_LENGTH) if is_large else (SAMPLES, LENGTH)
    return torch.randint(VOCABULARY, shape, generator=generator)


def batch_of(layout: Layout, step: int) -> tuple[Tensor, ...]:
    """Returns the arguments of a step function of this rank."""
    import smp

    if layout.has_experts:
        batch = make_expert_batch(smp.dp_rank(), step)
        return batch["input_ids"], batch["labels"]
    return (tokens_of(step, smp.rdp_rank(), layout.is_large),)


def is_late() -> bool:
    return os.environ["SMP_DEVICE"] == "late"


def wrapped(layout: Layout) -> Any:
    """Starts smp on the device of the environment, and wraps the model."""
    import smp
    from smp import _C
    from smp.world import runtime

    smp.init({"ddp": True, "microbatches": 4, "auto_partition": False, **dict(layout.config)})
    current = runtime.current()
    if current.rank.config.offload_activations == "all":
        current._activation_store = _C.ActivationStore(
            str(current.rank.device), horizon=1, group_bytes=1 << 20
        )
    if layout.has_experts:
        with smp.tensor_parallelism():
            experts: Any = build_experts("mixtral", torch.float32)
            experts.set_attn_implementation("eager")  # SDPA takes another kernel on the CPU
        return smp.DistributedModel(experts)
    width = LARGE_WIDTH if layout.is_large else WIDTH
    samples = LARGE_SAMPLES if layout.is_large else SAMPLES
    length = LARGE_LENGTH if layout.is_large else LENGTH
    net = Net(width, layout.dropout, (samples // 4, length - 1, width) if layout.writes else ())
    if smp.tp_size() > 1:
        for layer in net.layers[1:3]:
            smp.set_tensor_parallelism(layer)
    # Compiled code of the CPU has other roundings.
    compile = "stage" if layout.compiles and is_late() else None
    model: Any = smp.DistributedModel(net, compile=compile)
    for layer in net.layers[2:] if smp.pp_size() > 1 and not layout.is_automatic else ():
        smp.set_partition(layer, 1)
    if layout.checkpointed:
        for layer in net.layers:
            smp.set_activation_checkpointing(layer)
    return model


def own_parameters(model: Any) -> list[tuple[str, nn.Parameter]]:
    """Returns the parameters that this rank has."""
    from smp.modules.materialize import is_placeholder

    return [(name, p) for name, p in model.named_parameters() if not is_placeholder(p)]


def _resume(model: Any, optimizer: Any) -> None:
    """Saves a checkpoint, spoils the model and loads the checkpoint. Collective."""
    import smp

    folder = os.environ["SMP_TEST_FOLDER"]
    saved = smp.save_checkpoint(
        folder, tag="one", partial=True, model=model, optimizer=optimizer, blocking=False
    )
    saved.wait()
    with torch.no_grad():
        for _, parameter in own_parameters(model):
            parameter.zero_()
    smp.resume_from_checkpoint(folder, tag="one", partial=True)


def train(rank: int, layout: Layout, steps: int = 3) -> Trained:
    """Trains for some steps."""
    if is_late():
        import tests.dist.on_late  # noqa: F401
    os.environ["SMP_HOSTNAME"] = f"host{rank * layout.num_hosts // layout.world_size}"
    try:
        model = wrapped(layout)
        with (
            own_stream() if layout.has_own_stream and is_late() else contextlib.nullcontext(),
            small_pieces() if layout.offloads_state else contextlib.nullcontext([]) as pieces,
        ):
            trained = _train(model, layout, steps)
        trained.pieces = pieces
        return trained
    finally:
        del os.environ["SMP_HOSTNAME"]


def own_stream() -> Any:
    """Returns a context with a stream of this rank's device that is not the default one."""
    from smp.world import runtime

    device = torch.get_device_module("late")
    return device.stream(device.Stream(runtime.current().rank.device))


def hold_back(device: torch.device) -> None:
    """Keeps work that follows on the current stream from starting, while the host runs ahead.

    Whoever uses its results without a wait finds older ones. Nothing on the CPU.
    """
    if device.type != "cpu":
        import tests.device

        stream = torch.get_device_module("late").current_stream(device)
        tests.device.enqueue(stream, functools.partial(time.sleep, HELD_S))


def _train(model: Any, layout: Layout, steps: int) -> Trained:
    import smp
    from smp.world import runtime

    optimizers: dict[str, Any] = {
        "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "adam": functools.partial(smp.optimizers.FusedAdam, lr=1e-2),
        "lamb": functools.partial(smp.optimizers.FusedLAMB, lr=1e-2),
    }
    inner = optimizers[layout.optimizer](model.parameters())
    optimizer: Any = smp.DistributedOptimizer(inner)

    scaler = smp.amp.GradScaler(2.0**8, enabled=layout.scales)

    @smp.step
    def train_step(tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        found = model(tokens) if labels is None else model(input_ids=tokens, labels=labels)
        loss: Tensor = found if labels is None else found["loss"]
        model.backward(scaler.scale(loss) if layout.scales else loss)
        return loss

    result = Trained()
    losses: list[list[Tensor]] = []
    device = runtime.current().rank.device
    # A copy to the device waits, so all are made before the first step.
    batches = [[t.to(device) for t in batch_of(layout, step)] for step in range(steps)]
    for step in range(steps):
        optimizer.zero_grad()
        hold_back(device)
        output = train_step(*batches[step])
        if layout.scales:
            scaler.unscale_(optimizer)
        if layout.clips:
            optimizer.clip_master_grads(0.1)
        if step == steps - 1:
            result.gradients = {
                name: p.grad.cpu() for name, p in own_parameters(model) if p.grad is not None
            }
        hold_back(device)
        if layout.scales:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        if layout.resumes and step == 0:
            _resume(model, optimizer)
        # No read of the host waits for the device before the last step is over.
        losses.append([loss.detach() for loss in output.outputs])
    result.losses = [torch.stack([loss.cpu() for loss in step]) for step in losses]
    result.parameters = {name: p.cpu().clone() for name, p in model.state_dict().items()}
    result.device = device.type
    mailbox = runtime.current().rank.mailbox
    if mailbox is not None:
        result.lanes = {lane for _, _, lane, _ in mailbox.lanes()}
        stats = mailbox.stats()
        result.copied_bytes, result.message_bytes = stats["lane_bytes_sent"], stats["bytes_sent"]
    if layout.offloads:
        result.num_offloaded = smp.metrics.offload_stats()["offloaded"]
    if is_late():
        import tests.device

        result.late = {
            name: ways["late"] for name, ways in tests.device.counts().items() if "late" in ways
        }
    return result
