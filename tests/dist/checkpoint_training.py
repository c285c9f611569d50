"""Training jobs that show that checkpointing and offloading change memory and nothing else."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from tests.dist.training import assert_bitwise_equal, local_parameters
from tests.harness import train_step_of

TOKENS, HIDDEN = 128, 64  # activations of 32 kB
OFFLOADED_BYTES = 1 << 14  # in tests smaller tensors than by default leave


@dataclass(frozen=True)
class Cell:
    """A layout and a checkpointing strategy under which one model is trained.

    Attributes:
        kind: kind of model, a key of `_MODELS`.
        strategy: checkpointing strategy; "" is without, "enable" asks transformers for it.
        offload: whether ``offload_activations`` is set as well.
        config: further keys for ``smp.init``.
    """

    kind: str = "sequence"
    pp: int = 1
    tp: int = 1
    dp: int = 1
    schedule: str = "interleaved"
    microbatches: int = 4
    strategy: str = ""
    offload: bool = False
    manual: bool = True
    steps: int = 2
    horizon: int = 2
    config: tuple[tuple[str, Any], ...] = ()

    @property
    def world_size(self) -> int:
        return self.pp * self.tp * self.dp

    def key(self) -> tuple[Any, ...]:
        """Equal for cells that must give equal numbers."""
        return (self.kind, self.pp, self.tp, self.dp, self.schedule, self.microbatches, self.config)


@dataclass
class Record:
    """Records what one rank saw."""

    losses: list[list[float]] = field(default_factory=list)
    grads: list[dict[str, Tensor | None]] = field(default_factory=list)
    params: dict[str, Tensor] = field(default_factory=dict)
    runs: list[int] = field(default_factory=list)  # forwards of blocks here, by step
    recomputed: list[int] = field(default_factory=list)  # forwards of blocks in a backward, by step
    offload: dict[str, int] = field(default_factory=dict)
    leftovers: dict[str, float] = field(default_factory=dict)


class Counted(nn.Module):
    """Counts its forwards, and those of a backward."""

    runs = 0
    recomputed = 0

    def count(self) -> None:
        from smp.activations.recompute import is_recomputing

        type(self)._add(is_recomputing())

    @staticmethod
    def _add(is_again: bool) -> None:
        Counted.runs += 1
        Counted.recomputed += is_again

    @staticmethod
    def take() -> tuple[int, int]:
        counts = Counted.runs, Counted.recomputed
        Counted.runs = Counted.recomputed = 0
        return counts


class Block(Counted):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        self.count()
        y = self.down(self.dropout(nn.functional.gelu(self.up(self.norm(x)))))
        return x + self.dropout(y)


class Sequence(nn.Module):
    """A sequence of blocks between an embedding and a head."""

    def __init__(self, num_blocks: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, HIDDEN)
        self.blocks = nn.Sequential(*(Block() for _ in range(num_blocks)))
        self.head = nn.Linear(HIDDEN, 50)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.embedding(ids)))
        return nn.functional.cross_entropy(logits, ids)


class Piece(Counted):
    """Takes and returns nested structures; a result is an argument, another one None."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.dropout = nn.Dropout(0.2)

    def forward(
        self, pair: dict[str, Any], *, factor: float, extra: list[Tensor | None]
    ) -> tuple[dict[str, Any], Any, str]:
        self.count()
        x = self.dropout(self.linear(pair["x"])) * factor
        if extra[0] is not None:
            x = x + extra[0]
        ids = pair["inner"][1]
        made = {"x": x.tanh(), "inner": (None, ids), "mask": x > 0}
        return made, [pair["x"], None], "text"


class Structures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, HIDDEN)
        self.blocks = nn.ModuleList(Piece() for _ in range(4))
        self.head = nn.Linear(HIDDEN, 50)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        pair = {"x": x, "inner": (None, ids)}
        for i, block in enumerate(self.blocks):
            pair, (before, _), text = block(pair, factor=1.0 + i, extra=[x if i % 2 else None])
            assert text == "text" and pair["inner"][0] is None
            pair["x"] = pair["x"] + before * pair["mask"]
        return nn.functional.cross_entropy(self.head(pair["x"]), ids)


class Functions(nn.Module):
    """Calls PyTorch's own checkpointing of plain functions around its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.checkpoints = False
        self.embedding = nn.Embedding(50, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(HIDDEN, 50)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:

            def run(x: Tensor, block: nn.Module = block) -> Tensor:
                return torch.tanh(block(x))

            if self.checkpoints:
                x = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)
            else:
                x = run(x)
        return nn.functional.cross_entropy(self.head(x), ids)


class SplitFunctions(nn.Module):
    """The same around layers that are split over a tensor-parallel group."""

    def __init__(self) -> None:
        import smp

        super().__init__()
        self.checkpoints = False
        self.embedding = nn.Embedding(50, HIDDEN)
        self.blocks = nn.ModuleList(
            smp.nn.DistributedTransformerLayer(
                num_attention_heads=4, attention_head_size=16, hidden_size=HIDDEN,
                intermediate_size=2 * HIDDEN, causal_mask_size=64,
            )
            for _ in range(3)
        )  # fmt: skip
        for block in self.blocks:
            block.register_forward_pre_hook(lambda *_: Counted._add(False))
        self.head = nn.Linear(HIDDEN, 50)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:

            def run(x: Tensor, block: nn.Module = block) -> Any:
                return block((x, None))[0] * 1.5

            if self.checkpoints:
                x = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)
            else:
                x = run(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class OlderLayer(Block):
    """Makes a checkpoint of itself in ``__call__``, as layers of transformers 4.53 to 4.57 do."""

    gradient_checkpointing = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.gradient_checkpointing and self.training:
            call = functools.partial(super().__call__, **kwargs)
            return self._gradient_checkpointing_func(call, *args)  # type: ignore[operator]
        return super().__call__(*args, **kwargs)


class OlderModel(nn.Module):
    """Half of its layers make checkpoints themselves; of the others it does, as before 4.53."""

    gradient_checkpointing = False

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, HIDDEN)
        self.blocks = nn.ModuleList(OlderLayer() if i % 2 else Block() for i in range(4))
        self.head = nn.Linear(HIDDEN, 50)

    def gradient_checkpointing_enable(self) -> None:
        function = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=True)
        for module in self.modules():
            if hasattr(module, "gradient_checkpointing"):
                module.gradient_checkpointing = True
                module._gradient_checkpointing_func = function  # type: ignore[assignment]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for i, block in enumerate(self.blocks):
            if i % 2 == 0 and self.gradient_checkpointing and self.training:
                x = self._gradient_checkpointing_func(block.__call__, x)  # type: ignore[operator]
            else:
                x = block(x)
        return nn.functional.cross_entropy(self.head(x), ids)


def _gptj() -> nn.Module:
    from transformers import GPTJConfig, GPTJForCausalLM

    return GPTJForCausalLM(
        GPTJConfig(
            vocab_size=50, n_positions=64, n_embd=HIDDEN, n_layer=4, n_head=4, rotary_dim=8,
            resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, bos_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=50, max_position_embeddings=64, hidden_size=HIDDEN, num_hidden_layers=4,
            num_attention_heads=4, intermediate_size=2 * HIDDEN,
        )
    )  # fmt: skip


def _split() -> nn.Module:
    import smp

    return smp.nn.DistributedTransformerLMHead(
        num_layers=4, num_attention_heads=4, attention_head_size=16, hidden_size=64,
        intermediate_size=128, vocab_size=64, num_positions=64, causal_mask_size=64,
        pre_layernorm=True, post_layernorm=False,
    )  # fmt: skip


_MODELS: dict[str, Callable[[], nn.Module]] = {
    "sequence": Sequence,
    "structures": Structures,
    "functions": Functions,
    "split functions": SplitFunctions,
    "older": OlderModel,
    "gptj": _gptj,
    "bert": _bert,
    "split": _split,
}
_LAYERS = {
    "sequence": "blocks",
    "structures": "blocks",
    "functions": "blocks",
    "split functions": "blocks",
    "older": "blocks",
    "gptj": "transformer.h",
    "bert": "bert.encoder.layer",
    "split": "transformer.seq_layers",
}


def init(cell: Cell) -> None:
    """``smp.init`` as the cell says."""
    import smp
    from smp import _C
    from smp.world import runtime

    config: dict[str, Any] = {
        "pipeline_parallel_degree": cell.pp,
        "tensor_parallel_degree": cell.tp,
        "microbatches": cell.microbatches,
        "pipeline": cell.schedule,
        "ddp": cell.dp * cell.tp > 1,
        "auto_partition": not cell.manual,
        "offload_activations": cell.offload,
        "activation_loading_horizon": cell.horizon,
    }
    smp.init(config | dict(cell.config))
    if cell.offload:
        runtime.current()._activation_store = _C.ActivationStore(
            "cpu", cell.horizon, OFFLOADED_BYTES
        )


def make_model(cell: Cell) -> Any:
    """The distributed model of a cell, marked."""
    import smp

    torch.manual_seed(3)
    if cell.tp > 1 and cell.kind in ("gptj", "bert"):
        with smp.model_creation(tensor_parallelism=True):
            plain = _MODELS[cell.kind]()
    else:
        plain = _MODELS[cell.kind]()
    plain.train()
    if cell.manual and cell.pp > 1:
        layers = list(plain.get_submodule(_LAYERS[cell.kind]).children())
        for i, layer in enumerate(layers):
            smp.set_partition(layer, i * cell.pp // len(layers))
    model = smp.DistributedModel(plain)
    _mark(cell, model.get_module())
    return model


def _mark(cell: Cell, module: Any) -> None:
    import smp

    if cell.strategy == "":
        return
    if cell.strategy == "enable":
        module.gradient_checkpointing_enable()
    elif cell.kind in ("functions", "split functions"):
        module.checkpoints = True
    elif cell.kind in ("sequence", "split") or cell.tp > 1:
        sequence = next(child for child in module.modules() if type(child) is nn.Sequential)
        smp.set_activation_checkpointing(
            sequence, strategy=cell.strategy, pack_args_as_tuple=cell.kind != "sequence"
        )
    else:
        smp.set_activation_checkpointing(module.get_submodule(_LAYERS[cell.kind]))


def make_ids(cell: Cell, step: int) -> Tensor:
    import smp

    generator = torch.Generator().manual_seed(17 + step + 1000 * smp.dp_rank())
    if cell.kind in ("gptj", "bert", "split", "split functions"):
        return torch.randint(2, 50, (2 * cell.microbatches, 64), generator=generator)
    return torch.randint(2, 50, (TOKENS * cell.microbatches,), generator=generator)


def compute_loss(cell: Cell, model: Any, ids: Tensor) -> Tensor:
    if cell.kind in ("gptj", "bert"):
        loss: Tensor = model(input_ids=ids, labels=ids)["loss"]
    elif cell.kind == "split":
        loss = model((ids, None, None, None, ids)).loss
    else:
        loss = model(ids)
    return loss


def train(cell: Cell) -> Record:
    """Trains and records; leaves smp initialised."""
    import smp

    init(cell)
    model = make_model(cell)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    train_step = train_step_of(model, lambda model, ids: compute_loss(cell, model, ids))
    record = Record()
    Counted.take()
    for step in range(cell.steps):
        torch.manual_seed(100 + step)
        output = train_step(make_ids(cell, step))
        record.losses.append([loss.item() for loss in output.outputs])
        runs, recomputed = Counted.take()
        record.runs.append(runs)
        record.recomputed.append(recomputed)
        record.grads.append(
            {
                name: None if p.grad is None else p.grad.detach().clone()
                for name, p in local_parameters(model).items()
            }
        )
        optimizer.step()
        optimizer.zero_grad()
    record.params = {name: p.detach().clone() for name, p in local_parameters(model).items()}
    record.offload = dict(smp.metrics.offload_stats())
    stats = smp.metrics.server_stats()
    record.leftovers = {name: stats[name] for name in ("records", "stored")}
    return record


def train_all(rank: int, cells: list[Cell]) -> list[Record]:
    """Trains one cell after the other, each with its own init and shutdown."""
    import smp

    records = []
    for cell in cells:
        try:
            records.append(train(cell))
        except Exception as error:
            error.add_note(f"while running {cell}")
            raise
        smp.shutdown()
    return records


def check_equal(cells: list[Cell], results: list[list[Record]]) -> None:
    """Cells with one key agree bit by bit on every rank; the first of a key is the reference."""
    first: dict[tuple[Any, ...], int] = {}
    for index, cell in enumerate(cells):
        reference = first.setdefault(cell.key(), index)
        for rank, records in enumerate(results):
            ours, theirs, where = records[index], records[reference], f"{cell}, rank {rank}"
            assert ours.losses == theirs.losses, where
            assert max(ours.losses[-1]) < 10
            for step, grads in enumerate(ours.grads):
                assert_bitwise_equal(grads, theirs.grads[step], f"{where}, step {step}")
            assert_bitwise_equal(ours.params, theirs.params, where)
            largest = max(float(g.abs().max()) for g in ours.grads[0].values() if g is not None)
            assert largest > 1e-4, where
            assert not any(ours.leftovers.values()), f"{where}: {ours.leftovers}"
