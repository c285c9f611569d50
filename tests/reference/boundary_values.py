"""Rules of the boundary (see `boundary.py`): what may travel between ranks, and of which shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.reference.boundary import WIDTH, Away, Rule
from tests.reference.models import Place


class ShapesThatDependOnData(Rule):
    """Rows are left out, at the caller and inside a remote module, down to none."""

    def make_first(self) -> nn.Module:
        return _Compress()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        chosen = x[x[:, 0] > 0.3]
        return self.end(x) + self.second(chosen).sum() + y.sum()


class _Compress(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Away()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[x[:, 1] > 0.0]


class ResultsThatMayBeMissing(Rule):
    def make_first(self) -> nn.Module:
        return _Perhaps()

    def forward(self, x: Tensor) -> Tensor:
        y, extra = self.first(x)
        return self.end(y if extra is None else y + self.second(extra))


class _Perhaps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Away()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        y = self.inner(x)
        return y, (y * 2 if float(x.sum()) > 0 else None)


class ViewsWithoutGradients(Rule):
    """A rule that values made without gradients pass none on, wherever they are read."""

    def make_first(self) -> nn.Module:
        return _Views()

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.first(x)
        with torch.no_grad():
            flat, part = y.view(-1), y[:, : WIDTH // 2]
            z, same = self.first(y)
        again = flat.view(y.shape)  # with gradients, of a view without
        kept = y.transpose(0, 1).detach().transpose(0, 1)
        h = self.second(again * y) + self.second(kept) + self.second(flat.view(y.shape))
        return self.end(h + y * kept + same * y + z) + (part * y[:, WIDTH // 2 :]).sum()


class _Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Away()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x), x.view(x.shape)


class ResultsFirstReadWithoutGradients(Rule):
    """A result, its views and views of these are first looked at where no gradients are wanted.

    The loss of a detector does so: its matcher compares boxes before the loss uses them.
    """

    def forward(self, x: Tensor) -> Tensor:
        y, z = self.first(x), self.second(x)
        half, rows = y[:, :2], y.unbind(1)
        _, part = z.split([1, WIDTH - 1], dim=1)
        with torch.no_grad():
            scale = 1.0 + float(half.abs().sum() + part.sum() + rows[2].sum()) / 100
        return self.end(y) + scale * (half.sum() + (part * part).sum() + rows[3].sum())


class ViewOfAnArgumentMadeWithoutGradients(Rule):
    def make_first(self) -> nn.Module:
        return _CutView()

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(x)
        z, cut = self.first(y)
        return self.end(z + cut * 3 + y)


class _CutView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Away()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            cut = x.view(x.shape)
        return self.inner(x), cut


class ViewsThatAreWrittenAfterTheyWereRead(Rule):
    """A remote module writes to what this rank has read already, itself or a view of it."""

    def make_first(self) -> nn.Module:
        return _Writes()

    def forward(self, x: Tensor) -> Tensor:
        y, z = self.second(x), self.second(x * 2)
        turned, flat = y.t(), z.view(-1)
        read = (turned.cumsum(0).sum() + flat.cumsum(0).sum()).detach()
        doubled = self.first(turned) + self.first(z).t()
        assert torch.equal(turned, turned.relu()) and torch.equal(flat, flat.relu())
        return self.end(y + z + doubled.t() * (1 + 0 * read) + flat.view(y.shape))


class _Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Away()

    def forward(self, x: Tensor) -> Tensor:
        x.relu_()
        return x * self.inner.bias.sum() * 2


class NestedArguments(Rule):
    """Keywords, None, numbers, text, tuples with None, containers in containers."""

    def make_first(self) -> nn.Module:
        return _Nested()

    def forward(self, x: Tensor) -> Tensor:
        mask = [None] * 3
        result = self.first(
            (x, None, (2, [x * 2, {"a": x.sin()}])), True, 0.5, mode="up", mask=mask
        )
        assert result["none"] is None and result["pair"][1] == ("up", 3, True)
        return self.end(self.second(result["pair"][0]))


class _Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Away()

    def forward(
        self, packed: Any, flag: bool, factor: float, *, mode: str, mask: list[None]
    ) -> dict[str, Any]:
        x, none, (count, (double, named)) = packed
        assert none is None and flag is True and mode == "up" and mask == [None, None, None]
        y = self.inner(x) * factor + double + named["a"] * count
        return {"pair": (y, (mode, len(mask), flag)), "none": none}


class ModelOutputs(Rule):
    """``transformers.ModelOutput`` as result and as argument."""

    def make_first(self) -> nn.Module:
        return _OutputMaker()

    def make_second(self) -> nn.Module:
        return _OutputTaker()

    def forward(self, x: Tensor) -> Tensor:
        output = self.first(x)
        assert output[0] is output.last_hidden_state and output.attentions is None
        assert len(output) == 2 and output["hidden_states"][1] is x
        return self.end(self.second(output))


class _OutputMaker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Away()

    def forward(self, x: Tensor) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        y = self.inner(x)
        return BaseModelOutput(last_hidden_state=y, hidden_states=(y * 2, x))


class _OutputTaker(_OutputMaker):
    def forward(self, x: Any) -> Tensor:
        return self.inner(x.last_hidden_state) + x.hidden_states[0]


class OneTensorForManyModules(Rule):
    """A position bias with a gradient and a mask without, for layers of all ranks."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.bias = Away()
        self.layers = nn.ModuleList()
        for index in (0, 1, 1, 0, 1):
            with place(index):
                self.layers.append(_Biased())

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(x.shape[0], device=x.device)
        mask = (rows[:, None] + torch.arange(WIDTH, device=x.device)) % 3 == 0
        bias = self.first(self.bias(x))
        for layer in self.layers:
            x = layer(x, bias, mask, rows)
        return self.end(x)


class _Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Away()

    def forward(self, x: Tensor, bias: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
        assert mask.dtype == torch.bool and rows.dtype == torch.int64
        return torch.tanh(self.inner(x).masked_fill(mask, 0.1) + bias[rows])


class IntegersAndBools(Rule):
    """Results without gradients beside one with, used as indices and masks elsewhere."""

    def make_first(self) -> nn.Module:
        return _Router()

    def forward(self, x: Tensor) -> Tensor:
        y, order, mask, count = self.first(x)
        assert order.dtype == torch.int64 and mask.dtype == torch.bool and count.dim() == 0
        assert not (order.requires_grad or mask.requires_grad or count.requires_grad)
        return self.end(self.second(y[order]).masked_fill(mask, 0.0) * count)


class _Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Away()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        y = self.inner(x)
        return y, y[:, 0].argsort(), y > 0.7, (x > 0).sum()


class NonContiguousTensors(Rule):
    """Strides, expanded and sliced tensors arrive with their values."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x.t().contiguous().t())
        z = self.second(y[:, :1].expand(-1, WIDTH))
        wide = torch.cat([y, z], 1)
        return self.end(self.first(wide[:, ::2]) + self.second(wide.flip(1)[:, 1:5]))


class ViewsOfResults(Rule):
    """Whatever view of a result goes to another module, it is made where it is read."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        half = WIDTH // 2
        parts = [
            *y.chunk(2, dim=-1),
            *torch.split(y, half, dim=1),
            *y.split((1, WIDTH - 1), 1)[:1],
            *torch.tensor_split(y, [half], dim=-1),
            *(column.unsqueeze(1) for column in y.unbind(1)),
            torch.narrow(y, 1, 1, half),
            y.t().mT.movedim(0, 1).swapaxes(0, 1),
            torch.permute(y, (1, 0)).t()[:, :half],
        ]
        assert [part.shape[0] for part in parts] == [x.shape[0]] * len(parts)
        total = self.end(self.second(y[:, :1].expand(-1, WIDTH)))
        for part in parts:
            total = total + self.end(self.second(part.repeat(1, WIDTH // part.shape[1])))
        first, *_ = y  # iterates over rows
        whole = self.second(y.unfold(1, half, half).flatten(1))
        return total + self.end(whole) + self.end(self.second(first.expand(2, WIDTH)))


class ViewsWithoutModules(Rule):
    """Autograd meets views that are added up where the data are."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        left, right = y.chunk(2, dim=1)
        z = self.second(torch.cat([left + right, (y[:, :1] * 2).expand(-1, WIDTH // 2)], 1))
        rows = z.expand(3, *z.shape).sum(0) + z.mT.t()
        return self.end(rows + sum(row.sum() for row in z.unbind(1)))


class ParametersAsArguments(Rule):
    """A parameter of the caller is used by modules of other ranks."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.gain = nn.Parameter(torch.empty(WIDTH, dtype=torch.float64))
        with place(1):
            self.third = _Gain()

    def forward(self, x: Tensor) -> Tensor:
        y = self.third(self.first(x), self.gain)
        return self.end(self.third(self.second(y), self.gain * 2) + self.gain)


class _Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Away()

    def forward(self, x: Tensor, gain: Tensor) -> Tensor:
        return self.inner(x) * gain


class AttributesOfRemoteModules(Rule):
    """Parents ask children for dtype, device and shape of parameters."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.first.weight
        assert weight.dtype == x.dtype and weight.device == x.device and weight.shape == (4, 4)
        assert weight.requires_grad and isinstance(weight, nn.Parameter)
        assert next(self.second.parameters()).dtype == torch.float64
        return self.end(self.first(x.to(self.second.weight.dtype)) + self.second(x))


class TiedParameters(Rule):
    """An embedding and its head share a weight; both are on another rank than the body."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        with place(1):
            self.embedding = nn.Embedding(9, WIDTH, dtype=torch.float64)
            self.logits = nn.Linear(WIDTH, 9, bias=False, dtype=torch.float64)
            self.logits.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        ids = (x[:, 0].abs() * 4).long() % 9
        hidden = torch.tanh(self.head(self.embedding(ids)))
        return nn.functional.cross_entropy(self.logits(self.second(self.first(hidden))), ids)


class TablesMadeOnTheFly(Rule):
    """Buffers outside of the state, and a plain tensor that the module rebuilds when it must."""

    def make_second(self) -> nn.Module:
        return _Tables()

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.second(self.first(x)))


class _Tables(Away):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.linspace(0, 1, WIDTH).double(), persistent=False)
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or len(self.table) < len(x):
            self.table = torch.outer(torch.arange(len(x)).double(), self.steps).sin()
        return super().forward(x) + self.table[: len(x)] + self.steps


class Autocast(Rule):
    """Autocast of the caller holds inside a remote module."""

    def make_second(self) -> nn.Module:
        return _Float()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.second(x.float())
        assert y.dtype == torch.bfloat16
        return self.end(y.double() + self.first(x))


class _Float(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        assert y.dtype == torch.bfloat16 and torch.is_autocast_enabled("cpu")
        return y
