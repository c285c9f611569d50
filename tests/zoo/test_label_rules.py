"""Tests which labels count, by the rule of `smp.step`, and by what PyTorch's losses divide by."""

from __future__ import annotations

import os
import warnings

import pytest
import torch

from smp.step.labels import rule_of
from tests.reference.weights import Divisors
from tests.zoo.building import build, make_plan
from tests.zoo.catalogue import Entry, families
from tests.zoo.running import make_batches

transformers = pytest.importorskip("transformers", minversion="5.0")


def entries() -> list[Entry]:
    found = [e for own in families().values() for e in own if e.source == "transformers"]
    return found if os.environ.get("SMP_GRID") == "all" else found[::8]


def counted(entry: Entry) -> tuple[str, float, float] | None:
    """Returns words for the rule, its count, and the divisor of the loss; None: nothing to compare.

    Some labels, the first of a sequence among them, are ignored.
    """
    try:
        plan = make_plan(entry)
        model = build(plan)
        inputs = dict(make_batches(plan, 1)[0][0][0])
    except Exception:
        return None  # what the zoo cannot build it names itself
    rule = rule_of(model)
    labels = inputs.get("labels")
    if rule is None or not isinstance(labels, torch.Tensor) or labels.is_floating_point():
        return None
    if labels.dim() > 1:
        labels = labels.clone()
        generator = torch.Generator().manual_seed(5)
        labels[torch.rand(labels.shape, generator=generator) < 0.3] = rule.ignored
        labels[0, 0], labels[-1, 0] = rule.ignored, 1
        inputs["labels"] = labels
    divisors = Divisors()
    try:
        with divisors, torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(**inputs)
    except Exception:
        return None  # labels that may not be ignored
    if len(divisors.seen) != 1:
        return None  # several losses, of which the first step's check tells
    return str(rule), float(rule.count(labels)), divisors.seen[0]


@pytest.mark.sample(keep=8)
@pytest.mark.parametrize("entry", entries(), ids=str)
def test_labels_that_count_are_those_that_the_loss_divides_by(entry: Entry) -> None:
    seen = counted(entry)
    if seen is None:
        pytest.skip("no loss over labels")
    rule, count, divisor = seen
    assert count == divisor, rule
