"""A trace without memory follows the values that arguments and buffers decide on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smp.partition.costs import Trace
from smp.partition.trace import TraceError, trace

CPU = torch.device("cpu")


def traced(model: nn.Module, *args: Any, fake: bool = True) -> Trace:
    return trace(model, args, {}, device=CPU, fake=fake)


class Reader(nn.Module):
    """Finds its way by masks, sizes and places, as models of images and text do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 4)
        self.image = nn.Linear(3, 4)
        self.short, self.long = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("sizes", torch.tensor([1, 2]))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, ids: Tensor, mask: Tensor, pixels: Tensor) -> Tensor:
        self.calls += 1
        x = self.table(ids)
        places = ids == 7
        wanted = int(self.calls) * places.sum().item()
        features = self.image(pixels[(pixels != 0).any(-1)])
        if x[places].numel() != 4 * features.shape[0] or wanted != features.shape[0]:
            raise ValueError("as many images as places for them")
        x = x.masked_scatter(places.unsqueeze(-1), features)
        if not mask.all():
            x = x * mask.unsqueeze(-1)
        lengths = [row.sum() for row in mask]
        longest = torch.tensor(lengths).max()
        rows = torch.repeat_interleave(self.sizes, self.sizes)
        for begin, end in zip(rows.tolist(), mask.sum(1).tolist(), strict=False):
            layer = self.long if end - begin > 2 else self.short
            x = x + layer(x[:, : int(longest)]).mean()
        filled = x[mask.nonzero(as_tuple=True)]
        return filled.masked_select(mask[mask].unsqueeze(-1))


def arguments() -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.tensor([[1, 7, 2, 3], [7, 7, 4, 0]])
    pixels = torch.ones(4, 3)
    pixels[2] = 0
    return ids, torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]).bool(), pixels


def test_values_of_arguments_and_buffers_are_followed_without_weights() -> None:
    model = Reader()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    real = traced(model, *arguments(), fake=False)
    without = traced(model, *arguments())
    assert without.how == "fake"
    assert [c.num_calls for c in without.costs] == [c.num_calls for c in real.costs]
    assert without.cost_of(model.long).num_calls > 0 < without.cost_of(model.short).num_calls
    assert without.calls == real.calls
    for name in ("short", "long", "image", "table"):
        module = model.get_submodule(name)
        assert without.cost_of(module).forward_flops == real.cost_of(module).forward_flops
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    # Other values of the same shapes lead elsewhere.
    ids, mask, pixels = arguments()
    assert traced(model, ids, mask & (ids > 4), pixels).cost_of(model.long).num_calls == 0
    pixels[2] = 1
    with pytest.raises(TraceError, match="as many images as places"):
        traced(model, ids, mask, pixels)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.experts = nn.ModuleDict({f"expert_{i}": nn.Linear(4, 4) for i in range(3)})

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        if not torch.isfinite(scores).all() or torch.isnan(scores).any():
            raise ValueError("not finite")
        chosen = nn.functional.one_hot(scores.topk(2, -1).indices, 3).permute(2, 1, 0)
        result = torch.zeros_like(x)
        for idx in (chosen.sum((1, 2)) > 0).nonzero():
            _, rows = torch.where(chosen[idx[0]])
            result.index_add_(0, rows, self.experts[f"expert_{idx[0]}"](x[rows]))
        return result


def test_choices_by_parameters_are_taken_to_be_even() -> None:
    with torch.device("meta"):
        model = Experts()
    result = traced(model, torch.randn(12, 4))
    kept = [result.cost_of(expert).activation_bytes for expert in model.experts.values()]
    assert kept == [8 * 4 * 4] * 3, "two of three experts for each of 12 tokens"


@pytest.mark.parametrize("how", ["copied", "view", "item"])
def test_what_a_parameter_has_a_part_in_has_no_value(how: str) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            view = self.seen.view(2, 2)
            if how == "copied":
                self.seen.copy_(y.detach()[0])
            elif how == "view":
                view[0, 0] = y.detach()[0, 0]
            return y * (self.seen if how != "item" else y).sum().item()

    with pytest.raises(TraceError, match="_local_scalar_dense"):
        traced(Writes(), torch.randn(2, 4))


def test_losses_over_sequences_are_traced_by_shapes() -> None:
    class Speech(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 6)

        def forward(self, x: Tensor, labels: Tensor, packed: Tensor) -> Tensor:
            logits = self.layer(x).log_softmax(-1).transpose(0, 1)
            steps = torch.full((x.shape[0],), x.shape[1])
            loss = nn.functional.ctc_loss
            lengths = (labels > 0).sum(-1)
            return loss(logits, labels, steps, lengths) + loss(logits, packed, steps, lengths)

    labels = torch.tensor([[1, 2, 3], [4, 5, 0]])
    result = traced(Speech(), torch.randn(2, 9, 4), labels, labels[labels > 0])
    assert result.how == "fake"
