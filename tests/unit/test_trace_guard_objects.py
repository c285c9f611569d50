"""Plain objects that modules hold are after a trace what they were before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from smp.partition.trace import trace

CPU = torch.device("cpu")


class Table:
    """Positions, made at the first call, as diffusers' Z-Image has them."""

    def __init__(self) -> None:
        self.values: list[Tensor] | None = None
        self.calls = 0

    def __call__(self, length: int) -> Tensor:
        self.calls += 1
        if self.values is None:
            self.values = [torch.arange(1, 9) / 8.0]
        return self.values[0][:length]


class Holder:
    def __init__(self) -> None:
        self.table = Table()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.table = Table()
        self.holders = {"a": Holder()}

    def forward(self, x: Tensor) -> Tensor:
        rows = [self.table(4), self.holders["a"].table(3)]
        padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        result: Tensor = self.linear(x) * padded[0]
        return result


@pytest.mark.parametrize("fake", [True, False])
def test_tables_of_plain_objects_keep_nothing_of_a_trace(fake: bool) -> None:
    model = Net()
    x = torch.randn(3, 4)
    trace(model, (x,), {}, device=CPU, fake=fake)
    for table in (model.table, model.holders["a"].table):
        assert table.values is None and table.calls == 0
    expected = model.linear(x) * torch.arange(1, 5) / 8.0
    # A table without data gives zeros or what lay in memory, and no error.
    assert torch.allclose(model(x), expected)


def test_what_an_object_holds_stays_the_same_object() -> None:
    model = Net()
    model.table(4)
    before = model.table, model.table.values
    trace(model, (torch.randn(3, 4),), {}, device=CPU)
    assert (model.table, model.table.values) == before and model.table.values is before[1]
