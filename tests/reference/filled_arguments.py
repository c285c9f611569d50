"""Models whose modules fill lists, dictionaries and objects among their arguments.

Each `CASES` entry makes a model that takes a batch of shape [samples, 6] and returns a loss.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.reference.shared_state import Block, Stack


class Filling(Block):
    """A block that also returns its hidden values, for subclasses to store in their arguments."""

    def both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.up(x))
        return x + self.down(hidden), hidden


class ListBlock(Filling):
    def forward(self, x: Tensor, out: list[Tensor]) -> Tensor:  # type: ignore[override]
        x, hidden = self.both(x)
        out.append(hidden)
        return x


class FillsList(Stack):
    block = ListBlock

    def forward(self, x: Tensor) -> Tensor:
        out: list[Tensor] = []
        for block in self.blocks:
            x = block(x, out)
        assert len(out) == len(self.blocks)
        return (x * x).mean() + torch.stack(out).abs().mean()


class ReadingBlock(Filling):
    def forward(self, x: Tensor, out: list[Tensor]) -> Tensor:  # type: ignore[override]
        x, hidden = self.both(x + 0.1 * sum(out))
        out.append(hidden[:, :6])
        return x


class ReadByOthers(FillsList):
    """Later modules compute with what earlier ones have put there."""

    block = ReadingBlock


class DictBlock(Filling):
    def forward(self, batch: dict[str, Any], *, name: str) -> None:  # type: ignore[override]
        batch["x"], hidden = self.both(batch["x"])
        batch.update({name: hidden.mean()})
        batch.setdefault("all", []).append(hidden)
        batch["count"] += 1


class FillsDict(Stack):
    """Modules return nothing; an entry is replaced, others are new, a number counts."""

    block = DictBlock

    def forward(self, x: Tensor) -> Tensor:
        batch = {"count": 0, "x": x, "first": x}
        for i, block in enumerate(self.blocks):
            assert block(batch, name=f"mean{i}") is None
        assert batch["count"] == 4 and batch["first"] is x and len(batch["all"]) == 4
        names = ["count", "x", "first", "mean0", "all", "mean1", "mean2", "mean3"]
        assert list(batch) == names
        loss = (batch["x"] ** 2).mean() + sum(batch[f"mean{i}"] for i in range(4))
        return loss + sum(h.abs().mean() for h in batch["all"])


class NestedBlock(Filling):
    def forward(self, x: Tensor, deep: tuple[Any, ...], same: list[Any]) -> Any:  # type: ignore[override]
        x, hidden = self.both(x)
        assert deep[0]["lists"][0] is same
        same.append({"hidden": hidden, "mean": (hidden.mean(),)})
        deep[0]["lists"].append([hidden.mean()])
        deep[1]["x"] = x
        return deep[0], same


class FillsNested(Stack):
    """Containers in containers, two of which are one; results are the arguments themselves."""

    block = NestedBlock

    def forward(self, x: Tensor) -> Tensor:
        same: list[Any] = []
        deep: tuple[Any, ...] = ({"lists": [same]}, {})
        for block in self.blocks:
            first, second = block(x, deep, same)
            assert first is deep[0] and second is same
            x = deep[1]["x"]
        loss = (x * x).mean() + sum(item["hidden"].abs().mean() for item in same)
        return loss + sum(means[0] for means in deep[0]["lists"][1:])


class QueueBlock(Filling):
    def forward(self, queue: list[Tensor], batch: dict[str, Any]) -> None:  # type: ignore[override]
        x = queue.pop(0)
        given = batch.pop("given")
        out, hidden = self.both(x)
        queue.insert(0, out)
        queue.append(x)  # an argument
        batch["last"] = given
        batch["given"] = hidden[:, :6] * given


class RemovesEntries(Stack):
    """Items are taken out and put back elsewhere; tensors that were given stay the same ones."""

    block = QueueBlock

    def forward(self, x: Tensor) -> Tensor:
        queue = [x]
        batch: dict[str, Any] = {"given": torch.ones_like(x)}
        for block in self.blocks:
            x, given = queue[0], batch["given"]
            block(queue, batch)
            assert queue[-1] is x and batch["last"] is given
        return sum((q * q).mean() for q in queue) + batch["given"].mean()


@dataclass
class State:
    x: Tensor
    total: Any = 0.0
    seen: list[Any] = field(default_factory=list)
    more: Any = field(default_factory=SimpleNamespace)


class ObjectBlock(Filling):
    def forward(self, state: State) -> State:  # type: ignore[override]
        state.x, hidden = self.both(state.x)
        state.total += hidden.mean()
        state.seen.append(hidden)
        state.more.last = state.seen[-1]
        return state


class FillsObjects(Stack):
    block = ObjectBlock

    def forward(self, x: Tensor) -> Tensor:
        state = State(x)
        for block in self.blocks:
            assert block(state) is state
        assert state.more.last is state.seen[-1]
        loss = (state.x**2).mean() + state.total + state.more.last.square().mean()
        return loss + sum(h.abs().mean() for h in state.seen)


class InPlaceBlock(Filling):
    def forward(self, batch: dict[str, Any]) -> None:  # type: ignore[override]
        x, hidden = self.both(batch["x"].clone())
        batch["sum"] += hidden.mean()  # writes to the tensor
        batch["x"].mul_(0.5).add_(x)


class TensorsInPlace(Stack):
    """Tensors in a dictionary are written to; other places that have them see it."""

    block = InPlaceBlock

    def forward(self, x: Tensor) -> Tensor:
        batch = {"x": x * 1.0, "sum": x.new_zeros(())}
        also = batch["sum"]
        for block in self.blocks:
            block(batch)
            assert batch["sum"] is also
        return (batch["x"] ** 2).mean() + also


class KindsBlock(Filling):
    def forward(self, x: Tensor, kinds: dict[str, Any]) -> Tensor:  # type: ignore[override]
        x, hidden = self.both(x)
        kinds["order"]["new"] = hidden
        kinds["order"].move_to_end("old")
        kinds["default"]["a"].append(hidden)
        kinds["queue"].append(hidden)
        kinds["names"].add(f"seen{len(kinds['names'])}")
        return x


class OtherKinds(Stack):
    block = KindsBlock

    def forward(self, x: Tensor) -> Tensor:
        kinds: dict[str, Any] = {
            "order": OrderedDict(old=x),
            "default": defaultdict(list),
            "queue": deque(maxlen=3),
            "names": set(),
        }
        for block in self.blocks:
            x = block(x, kinds)
        assert list(kinds["order"]) == ["new", "old"] and kinds["order"]["new"] is kinds["queue"][2]
        assert kinds["names"] == {f"seen{i}" for i in range(4)} and len(kinds["queue"]) == 3
        loss = (x * x).mean() + sum(h.mean() for h in kinds["queue"])
        return loss + sum(h.abs().mean() for h in kinds["default"]["a"])


class Outer(nn.Module):
    """Hands the list on, and computes with what it has got."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.inner = nn.ModuleList(ReadingBlock() for _ in range(2))

    def forward(self, x: Tensor, out: list[Tensor]) -> Tensor:
        out.append(x * self.scale)
        for inner in self.inner:
            x = inner(x, out)
        return torch.tanh(x + out[-1] * self.scale)


class HandedOn(FillsList):
    block = Outer

    def forward(self, x: Tensor) -> Tensor:
        out: list[Tensor] = []
        for block in self.blocks:
            x = block(x, out)
        assert len(out) == 12
        return (x * x).mean() + torch.stack(out).abs().mean()


class Remembering(ListBlock):
    """Keeps the list that it was given; the next call of this microbatch finds it."""

    kept: list[Tensor] | None = None

    def forward(self, x: Tensor, out: list[Tensor]) -> Tensor:  # type: ignore[override]
        if self.kept is not None:
            x = x + 0.1 * sum(h.mean() for h in self.kept)
        self.kept = out
        return super().forward(x, out)


class KeptContainers(Stack):
    block = Remembering

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block.kept = None
        for _ in range(2):
            out: list[Tensor] = []
            for block in self.blocks:
                x = block(x, out)
        return (x * x).mean()


CASES: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind
    for kind in (
        *(FillsList, ReadByOthers, FillsDict, FillsNested, RemovesEntries, FillsObjects),
        *(TensorsInPlace, OtherKinds, HandedOn, KeptContainers),
    )
}


def make(case: str) -> nn.Module:
    """A model with reproducible weights, in float64."""
    torch.manual_seed(7)
    return CASES[case]().double()
