"""Patterns of what tensors are and share: writes in place, views, odd layouts, odd parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.patterns import WIDTH, WORDS, Layer, Tower, layers, mse, pattern

# ---- writes and views --------------------------------------------------------


@pattern
class WritesResultsInPlace(Tower):
    """The parent changes what a layer returned, and hands it to the next one."""

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x.add_(1)
            x[:, 0] = 0
        return x


class _WritesInput(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        return super().forward(x)


@pattern
class LayersWriteTheirInput(Tower):
    """Layers change their argument, which the parent uses afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_WritesInput() for _ in range(4))

    def body(self, x: Tensor) -> Tensor:
        x = x.clone()
        for layer in self.layers:
            before = x * 1.0
            x = layer(before) + before
        return x


class _Halves(Layer):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        out = super().forward(x)
        return out[:, : WIDTH // 2], out[:, WIDTH // 2 :]


@pattern
class ViewsOfOneResult(Tower):
    """A layer returns two views of one tensor; the parent writes into one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Halves() for _ in range(4))

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            first, second = layer(x)
            x = torch.cat([first.clone().add_(second), second * 2], dim=1)
        return x


class _Same(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.own(x)


@pattern
class ReturnsItsArgument(Tower):
    """Layers return the tensor that came, and the parent asks whether it is the same one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Same() for _ in range(4))

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            same, new = layer(x)
            x = torch.tanh(new + (same if same is x else -same))
        return x


@pattern
class ExpandedAndTransposed(Tower):
    """Passes layers tensors that are expanded, transposed or a step of two."""

    def body(self, x: Tensor) -> Tensor:
        mean = x.mean(0, keepdim=True).expand_as(x)
        x = self.layers[0](mean) + self.layers[1](x.t().contiguous().t())
        wide = torch.stack([x, x], dim=2).flatten(1)[:, ::2]
        out: Tensor = self.layers[3](self.layers[2](wide))
        return out


class _SpectralLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.fft(super().forward(x).to(torch.complex128))
        width = torch.complex64 if x.dtype == torch.float32 else torch.complex128
        narrow: Tensor = spectrum.to(width)
        return narrow


class _BackLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        back = torch.fft.ifft(x).real
        return super().forward(back.to(self.a.weight.dtype))


@pattern
class ComplexBetweenLayers(Tower):
    """Complex tensors travel between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            _SpectralLayer() if place % 2 == 0 else _BackLayer() for place in range(4)
        )


class _Counted(NamedTuple):
    value: Tensor
    layers: Tensor
    mask: Tensor


class _CountedLayer(Layer):
    def forward(self, state: _Counted) -> _Counted:  # type: ignore[override]
        value = super().forward(state.value)
        return _Counted(value, state.layers + 1, value > 0)


@pattern
class NumbersAndMasks(Tower):
    """Integers of no dims and booleans travel beside the features."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_CountedLayer() for _ in range(4))

    def body(self, x: Tensor) -> Tensor:
        state = _Counted(x, torch.tensor(0), x > 0)
        for layer in self.layers:
            state = layer(state)
        return torch.where(state.mask, state.value, state.value / state.layers)


@pattern
class NothingInBetween(Tower):
    """Calls layers with inputs of which some have no element."""

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) + layer(x[:0]).sum()
        return x


# ---- parameters ----------------------------------------------------------------


@pattern
class NormedEmbedding(Tower):
    """Rows of a table are scaled in the forward that reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH, padding_idx=0, max_norm=1.0)
        self.late = nn.Embedding(WORDS, WIDTH, max_norm=0.5, scale_grad_by_freq=True)

    def forward(self, ids: Tensor, targets: Tensor, x: Tensor, y: Tensor) -> Any:
        out = self.body(x + self.table(ids).mean(1))
        return mse(out + self.late(targets).mean(1), y)


@pattern
class ScalarsOfTheRoot(Tower):
    """Parameters of no dims, of a list and of a dictionary, all of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(4))
        self.shifts = nn.ParameterDict({"a": torch.zeros(WIDTH), "b": torch.ones(1)})

    def body(self, x: Tensor) -> Tensor:
        for layer, gain in zip(self.layers, self.gains, strict=True):
            x = layer(x * gain + self.shifts["a"]) * self.scale
        out: Tensor = x + self.shifts["b"]
        return out


@pattern
class WeightOfManyNames(Tower):
    """Gives one weight to three owners, and uses it transposed in a fourth place."""

    def __init__(self) -> None:
        super().__init__()
        maps = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        for linear in maps[1:3]:
            linear.weight = maps[0].weight
        self.maps = nn.ModuleList(maps)

    def body(self, x: Tensor) -> Tensor:
        for layer, linear in zip(self.layers, self.maps, strict=True):
            x = layer(linear(x))
        first = self.maps[0]
        assert isinstance(first, nn.Linear)
        return F.linear(x, first.weight.t())


@pattern
class PartlyFrozen(Tower):
    """Every other parameter is frozen, and one module as a whole."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            assert isinstance(layer, Layer)
            layer.a.weight.requires_grad_(False)
        self.layers[1].requires_grad_(False)


@pattern
class ThawsByStep(Tower):
    """The forward thaws a layer after some calls."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.layers[3].requires_grad_(False)

    def body(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 3:
            self.layers[3].requires_grad_(True)
        return super().body(x)


@pattern
class DetachesAndPasses(Tower):
    """Gradients stop at one layer, and pass a rounding straight through."""

    def body(self, x: Tensor) -> Tensor:
        x = self.layers[0](x).detach() + self.layers[1](x)
        x = x + (torch.round(x * 8) / 8 - x).detach()
        with torch.no_grad():
            gate = self.layers[2](x).sigmoid()
        out: Tensor = self.layers[3](x * gate)
        return out


class _Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bound: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.bound = bound
        return x.clamp(-bound, bound)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return torch.where(x.abs() <= ctx.bound, grad, grad * 0.1), None


@pattern
class OwnFunctions(Tower):
    """An own autograd function between layers, and one on the result of a layer."""

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            clipped: Tensor = _Clip.apply(layer(x), 0.8)  # type: ignore[no-untyped-call]
            x = clipped
        return x


# ---- control ---------------------------------------------------------------------


@pattern
class BranchesByData(Tower):
    """Chooses the layers that run, and how often, by the data of a microbatch."""

    def forward(self, ids: Tensor, targets: Tensor, x: Tensor, y: Tensor) -> Any:
        if int(ids.sum()) % 2:
            x = self.layers[1](x)
        for _ in range(1 + int(ids[0, 0]) % 3):
            x = self.layers[2](self.layers[0](x))
        return mse(self.layers[3](x) if float(x.sum()) > 0 else x, y)


@pattern
class BranchesByResults(Tower):
    """The parent asks for numbers of what layers gave, and goes on by them."""

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            out = layer(x)
            x = out if out.norm().item() < 4 else out / out.norm()
            kept = x[out.mean(1) > -10]
            x = x + kept.mean(0)
        return x


@pattern
class ManyLosses(Tower):
    """A loss after each layer, kept in a list; some are weighted, one is detached."""

    def forward(self, ids: Tensor, targets: Tensor, x: Tensor, y: Tensor) -> Any:
        losses = []
        for layer in self.layers:
            x = layer(x)
            losses.append(mse(x, y))
        return losses[-1] + 0.3 * sum(losses[:-1]) + losses[0].detach()


@pattern
class SortsAndScatters(Tower):
    """Order of rows, running sums and scattered rows between layers."""

    def body(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        order = x[:, 0].argsort()
        x = self.layers[1](x[order].cumsum(0))
        spread = torch.zeros_like(x).index_add(0, order, x).scatter(1, order[:, None], 0.5)
        values, places = self.layers[2](spread).topk(WIDTH // 2, dim=1)
        out: Tensor = self.layers[3](torch.zeros_like(x).scatter(1, places, values))
        return out


class _Tree(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.own = Layer()
        self.children_of = nn.ModuleList(_Tree(depth - 1) for _ in range(2 if depth else 0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.own(x)
        for child in self.children_of:
            x = x + child(x)
        return x


@pattern
class Recursive(nn.Module):
    """A tree of modules of one class, each of which calls its children."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = _Tree(2)

    def forward(self, ids: Tensor, targets: Tensor, x: Tensor, y: Tensor) -> Any:
        return mse(self.tree(x), y)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _MakesConstants(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.linspace(0.5, 1.5, WIDTH).to(x)


@pattern
class DefaultsAroundCalls(Tower):
    """A default of PyTorch is changed around calls whose modules make tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_MakesConstants() for _ in range(4))

    def body(self, x: Tensor) -> Tensor:
        with _default_dtype(torch.float64):
            return super().body(x)


class _Threshold(Layer):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.b.bias.clamp_(-0.01, 0.01)
        return super().forward(x)


@pattern
class WritesItsParameters(Tower):
    """The forward keeps a bias within bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Threshold() for _ in range(4))


class _Adds(Layer):
    def forward(self, x: Tensor, total: Tensor) -> Tensor:  # type: ignore[override]
        out = super().forward(x)
        total += out.detach().abs().mean()
        return out


@pattern
class SumsIntoABuffer(Tower):
    """Layers add to a buffer of the root that they are given."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Adds() for _ in range(4))
        self.register_buffer("total", torch.zeros(()))

    def body(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.total.zero_()
        for layer in self.layers:
            x = layer(x, self.total)
        return x / (1 + self.total)


@pattern
class ModesOfParts(Tower):
    """Batch norms of which one stays in evaluation, with momentum by count."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH, momentum=None) for _ in range(4))
        self.norms[2].eval()

    def body(self, x: Tensor) -> Tensor:
        self.norms[2].eval()
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x))
        return x


@pattern
class EncoderAndDecoder(nn.Module):
    """PyTorch's own transformer, with masks."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 2, 2, 2, 2 * WIDTH, 0.0, batch_first=True)

    def forward(self, ids: Tensor, targets: Tensor, x: Tensor, y: Tensor) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=x.dtype)
        out = self.transformer(
            self.words(ids) + x[:, None],
            self.words(targets),
            tgt_mask=mask,
            src_key_padding_mask=ids == 0,
            tgt_is_causal=True,
        )
        return F.cross_entropy((out @ self.words.weight.t()).flatten(0, 1), targets.flatten())


@pattern
class PackedSequences(nn.Module):
    """Recurrent layers over packed sequences, in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.first = nn.GRU(WIDTH, WIDTH, bidirectional=True, batch_first=True)
        self.second = nn.LSTM(2 * WIDTH, WIDTH, 2, batch_first=True)
        self.after = layers(2)

    def forward(self, ids: Tensor, targets: Tensor, x: Tensor, y: Tensor) -> Any:
        lengths = 1 + ids[:, 0] % ids.shape[1]
        packed = nn.utils.rnn.pack_padded_sequence(
            self.words(ids), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        states, (last, _) = self.second(self.first(packed)[0])
        padded, _ = nn.utils.rnn.pad_packed_sequence(states, batch_first=True)
        out = last[-1] + padded.sum(1)
        for layer in self.after:
            out = layer(out)
        return mse(out, y)
