"""Trains small models on ranks of the late device, or of the CPU, for the same bits on both."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, VOCABULARY, LENGTH, SAMPLES = 16, 32, 6, 8


class Block(nn.Module):
    """A residual block with a norm, products, a shape that depends on no data, and dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.nn.functional.gelu(self.up(self.norm(x)), approximate="tanh")
        return x + self.dropout(self.down(inner))


class Net(nn.Module):
    """An embedding, four blocks and a head that returns the mean loss."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
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
    """

    config: tuple[tuple[str, Any], ...] = ()
    dropout: float = 0.0
    checkpointed: bool = False
    optimizer: str = "adam"
    clips: bool = False
    resumes: bool = False

    @property
    def is_automatic(self) -> bool:
        """Returns whether the library chooses the ranks of modules, for which devices count."""
        return bool(dict(self.config).get("auto_partition"))

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
        late: numbers of calls that ran late, by operator; empty on the CPU.
        device: device of the parameters.
    """

    losses: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    late: dict[str, int] = field(default_factory=dict)
    device: str = ""


def tokens_of(step: int, replica: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + replica)
    return torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator)


def is_late() -> bool:
    return os.environ["SMP_DEVICE"] == "late"


def wrapped(layout: Layout) -> Any:
    """Starts smp on the device of the environment, and wraps the model."""
    if is_late():
        import tests.dist.on_late  # noqa: F401
    import smp

    smp.init({"ddp": True, "microbatches": 4, "auto_partition": False, **dict(layout.config)})
    net = Net(layout.dropout)
    if smp.tp_size() > 1:
        for layer in net.layers[1:3]:
            smp.set_tensor_parallelism(layer)
    model: Any = smp.DistributedModel(net)
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
    smp.save_checkpoint(folder, tag="one", partial=True, model=model, optimizer=optimizer)
    with torch.no_grad():
        for _, parameter in own_parameters(model):
            parameter.zero_()
    smp.resume_from_checkpoint(folder, tag="one", partial=True)


def train(rank: int, layout: Layout, steps: int = 3) -> Trained:
    """Trains for some steps."""
    import smp
    from smp.world import runtime

    model = wrapped(layout)
    optimizers: dict[str, Any] = {
        "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "adam": functools.partial(smp.optimizers.FusedAdam, lr=1e-2),
        "lamb": functools.partial(smp.optimizers.FusedLAMB, lr=1e-2),
    }
    inner = optimizers[layout.optimizer](model.parameters())
    optimizer: Any = smp.DistributedOptimizer(inner)

    @smp.step
    def train_step(tokens: Tensor) -> Tensor:
        loss: Tensor = model(tokens)
        model.backward(loss)
        return loss

    result = Trained()
    device = runtime.current().rank.device
    for step in range(steps):
        optimizer.zero_grad()
        tokens = tokens_of(step, smp.rdp_rank())
        output = train_step(tokens.to(device))
        if layout.clips:
            optimizer.clip_master_grads(0.1)
        if step == steps - 1:
            result.gradients = {
                name: p.grad.cpu() for name, p in own_parameters(model) if p.grad is not None
            }
        optimizer.step()
        if layout.resumes and step == 0:
            _resume(model, optimizer)
        result.losses.append(torch.stack([loss.detach().cpu() for loss in output.outputs]))
    result.parameters = {name: p.cpu().clone() for name, p in model.state_dict().items()}
    result.device = device.type
    if is_late():
        import tests.device

        result.late = {
            name: ways["late"] for name, ways in tests.device.counts().items() if "late" in ways
        }
    return result
