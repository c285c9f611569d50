"""`@smp.step`: cutting arguments, merging results, the same on every rank."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist.pool import Pool
from tests.dist.training import Run, init, make_model
from tests.reference.data import make_batch

LAYOUTS = ((1, 1), (2, 1), (2, 2))  # (pipeline, data parallel)


def on_layouts(function: Any) -> Any:
    return pytest.mark.parametrize(("pp", "dp"), LAYOUTS)(function)


def start(pp: int, dp: int, microbatches: int = 4) -> Any:
    """A distributed `chain` on a fresh layout."""
    run = Run("chain", pp, dp, microbatches=microbatches, manual=True)
    init(run)
    return make_model(run)


# ---- results ---------------------------------------------------------------


def return_everything(rank: int, pp: int, dp: int) -> dict[str, Any]:
    import smp

    model = start(pp, dp)

    @smp.step
    def everything(x: Tensor, y: Tensor) -> dict[str, Any]:
        out = model(x)
        loss = (out - y).square().mean()
        model.backward(loss)
        return {
            "loss": loss,
            "pair": (out, [3, "text"]),
            "none": None,
            "numbers": (7, 2.5),
            "flag": True,
        }

    batch = make_batch("chain", torch.float64, smp.dp_rank(), 0)
    result = everything(batch["x"], y=batch["y"])
    loss, out = result["loss"], result["pair"][0]
    assert type(result) is dict and type(result["pair"]) is tuple
    assert isinstance(loss, smp.StepOutput) and isinstance(out, smp.StepOutput)
    assert len(loss.outputs) == 4 and all(t.dim() == 0 for t in loss.outputs)
    assert [t.shape for t in out.outputs] == [(2, 1)] * 4
    assert torch.equal(loss.reduce_mean(), torch.stack(loss.outputs).mean())
    assert torch.equal(loss.reduce_sum(), sum(loss.outputs))
    assert torch.equal(loss.stack(), torch.stack(loss.outputs))
    assert torch.equal(loss.concat(), torch.stack(loss.outputs))  # 0-dim members are stacked
    assert out.concat().shape == (8, 1) and out.stack().shape == (4, 2, 1)
    assert torch.equal(out.detach().concat(), torch.cat(out.outputs))
    assert isinstance(out.detach(), smp.StepOutput)
    assert not loss.outputs[0].requires_grad and not out.outputs[0].requires_grad
    assert result["none"] is None
    assert result["pair"][1] == [[3] * 4, ["text"] * 4]
    assert result["numbers"] == ([7] * 4, [2.5] * 4)
    assert result["flag"] == [True] * 4
    return {"loss": loss.stack(), "out": out.concat(), "dp_rank": smp.dp_rank()}


@on_layouts
def test_step_outputs_have_the_documented_form_on_every_rank(pool: Pool, pp: int, dp: int) -> None:
    results = pool.run(pp * dp, return_everything, pp, dp)
    for result in results:
        twins = [r for r in results if r["dp_rank"] == result["dp_rank"]]
        assert all(torch.equal(result["out"], twin["out"]) for twin in twins)
        assert all(torch.equal(result["loss"], twin["loss"]) for twin in twins)
    if dp > 1:
        assert not torch.equal(results[0]["out"], results[-1]["out"])


def return_model_output(rank: int) -> None:
    from transformers.modeling_outputs import CausalLMOutput

    import smp

    run = Run("gpt2", 2, 1)
    init(run)
    model = make_model(run)
    batch = make_batch("gpt2", run.dtype, 0, 0)

    @smp.step
    def evaluate(inputs: dict[str, Tensor]) -> Any:
        return model(**inputs)

    with torch.no_grad():
        result = evaluate(batch)
    assert isinstance(result, dict) and "loss" in result
    assert result["logits"].concat().shape == (8, 7, 41)
    assert isinstance(result["loss"], smp.StepOutput)
    assert result[0] is result["loss"] and "logits" in dict(result.items())
    assert not isinstance(result, CausalLMOutput) or result.loss is result["loss"]


def test_model_outputs_stay_dicts_of_step_outputs(pool: Pool) -> None:
    pool.run(2, return_model_output)


def keep_graphs(rank: int) -> tuple[bool, bool]:
    import smp

    model = start(2, 1)
    x = make_batch("chain", torch.float64, 0, 0)["x"]

    def forward(x: Tensor) -> Tensor:
        return model(x)

    kept = smp.step(detach_outputs=False)(forward)(x)
    cut = smp.step(detach_outputs=True)(forward)(x)
    assert torch.equal(kept.concat(), cut.concat())
    return kept.outputs[0].requires_grad, cut.outputs[0].requires_grad


def test_detach_outputs_decides_whether_graphs_stay(pool: Pool) -> None:
    driver, _ = pool.run(2, keep_graphs)
    assert driver == (True, False)


# ---- arguments -------------------------------------------------------------


class Sentence:
    """A user's type that knows how to cut itself."""

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def smp_slice(self, num_mb: int, mb: int, axis: int) -> Sentence:
        assert axis == 0
        size = len(self.words) // num_mb
        return Sentence(self.words[mb * size : (mb + 1) * size])


@dataclasses.dataclass
class Options:
    """A class that is not a container for the library: passed whole."""

    tensor: Tensor


def cut_arguments(rank: int, pp: int, dp: int) -> None:
    import smp

    start(pp, dp)
    seen: list[dict[str, Any]] = []
    x = torch.arange(24.0).reshape(8, 3)
    options = Options(x)

    @smp.step(non_split_inputs=["whole"], input_split_axes={"columns": 1})
    def look(
        first: Any, whole: Tensor, columns: Tensor, *rest: Any, keyword: Any = 5, **more: Any
    ) -> Tensor:
        seen.append(
            {"first": first, "whole": whole, "columns": columns, "rest": rest}
            | {"keyword": keyword, "more": more}
        )
        return first["nested"][0]

    result = look(
        {"nested": [x, (x + 1, None)], "n": 4, "scalar": torch.tensor(2.0)},
        x,
        x.t().contiguous(),
        Sentence(list("abcdefgh")),
        options,
        keyword=x * 2,
        extra={"name": "text", "many": x},
    )
    assert torch.equal(result.concat(), x)
    seen.sort(key=lambda s: float(s["first"]["nested"][0][0, 0]))
    for mb, arguments in enumerate(seen):
        rows = slice(2 * mb, 2 * mb + 2)
        first = arguments["first"]
        assert torch.equal(first["nested"][0], x[rows])
        assert torch.equal(first["nested"][1][0], x[rows] + 1) and first["nested"][1][1] is None
        assert first["n"] == 4 and first["scalar"] == 2.0
        assert torch.equal(arguments["whole"], x)
        assert torch.equal(arguments["columns"], x.t()[:, rows])
        assert arguments["rest"][0].words == list("abcdefgh")[rows]
        assert arguments["rest"][1] is options
        assert torch.equal(arguments["keyword"], x[rows] * 2)
        assert arguments["more"]["extra"]["name"] == "text"
        assert torch.equal(arguments["more"]["extra"]["many"], x[rows])
    assert len(seen) == 4


@on_layouts
def test_arguments_are_cut_as_documented(pool: Pool, pp: int, dp: int) -> None:
    pool.run(pp * dp, cut_arguments, pp, dp)


def take_inputs_of_driver(rank: int) -> Tensor:
    import smp

    model = start(2, 1)
    batch = make_batch("chain", torch.float64, 0, 0)
    x = batch["x"] if smp.pp_rank() == 0 else torch.empty(8, 0)

    @smp.step
    def train(x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        model.backward((out - y).square().mean())
        return out

    return train(x, batch["y"]).concat()


def test_other_ranks_may_pass_empty_dummies(pool: Pool) -> None:
    driver, other = pool.run(2, take_inputs_of_driver)
    assert torch.equal(driver, other) and driver.abs().max() > 0


class Trainer:
    """Decorates in its body, without `self`, like a public GPT-J script."""

    import smp

    @smp.step
    def train_step(model: Any, x: Tensor) -> Tensor:  # noqa: N805
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    def run(self, model: Any, x: Tensor) -> Any:
        return self.train_step(model, x)


def decorate_in_a_class(rank: int) -> float:
    model = start(2, 1)
    loss = Trainer().run(model, make_batch("chain", torch.float64, 0, 0)["x"])
    return float(loss.reduce_mean())


def test_step_in_a_class_body_is_called_without_self(pool: Pool) -> None:
    losses = pool.run(2, decorate_in_a_class)
    assert losses[0] == losses[1] > 0


def decorator_forms(rank: int) -> None:
    import smp

    start(1, 1)

    def double(x: Tensor) -> Tensor:
        """Doubles."""
        return x * 2

    x = torch.arange(8.0)
    for decorated in (smp.step(double), smp.step()(double), smp.step(detach_outputs=True)(double)):
        assert torch.equal(decorated(x).concat(), x * 2)
        assert decorated.__name__ == "double" and decorated.__doc__ == "Doubles."
        assert not hasattr(decorated, "__get__"), "a descriptor would bind self"


def test_all_decorator_forms_work(pool: Pool) -> None:
    pool.run(1, decorator_forms)


# ---- forward only ----------------------------------------------------------


def alternate(rank: int, pp: int, dp: int, eval_first: bool) -> dict[str, Any]:
    import smp
    from tests.dist.training import local_parameters

    model = start(pp, dp)

    @smp.step
    def train(x: Tensor, y: Tensor) -> Tensor:
        loss = (model(x) - y).square().mean()
        model.backward(loss)
        return loss

    @smp.step
    def evaluate(x: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        out = model(x)
        assert not out.requires_grad
        return out

    batch = make_batch("chain", torch.float64, smp.dp_rank(), 0)
    outputs, losses, grads = [], [], []
    for turn in range(4):
        if (turn % 2 == 0) == eval_first:
            model.eval()
            with torch.no_grad():
                outputs.append(evaluate(batch["x"]).concat())
        else:
            model.train()
            losses.append(train(batch["x"], batch["y"]).reduce_mean())
            grads.append([p.grad.clone() for p in local_parameters(model).values()])
            model.zero_grad()
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(losses[0], losses[1])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    return {"out": outputs[0], "y": batch["y"], "loss": losses[0]}


@pytest.mark.parametrize("eval_first", [True, False])
@on_layouts
def test_evaluation_and_training_alternate(pool: Pool, pp: int, dp: int, eval_first: bool) -> None:
    for result in pool.run(pp * dp, alternate, pp, dp, eval_first):
        expected = (result["out"] - result["y"]).square().mean()
        assert torch.allclose(result["loss"], expected, rtol=1e-12)


def evaluate_uneven(rank: int) -> list[list[int]]:
    import smp

    model = start(2, 1)

    @smp.step
    def evaluate(x: Tensor) -> Tensor:
        return model(x)

    x = make_batch("chain", torch.float64, 0, 0)["x"]
    sizes = []
    with torch.no_grad():
        whole = evaluate(x).concat()
        for n in (7, 5, 3, 1):
            out = evaluate(x[:n])
            assert torch.allclose(out.concat(), whole[:n], rtol=1e-12)
            sizes.append([len(t) for t in out.outputs])
    return sizes


def test_forward_only_steps_cut_the_last_batch_unevenly(pool: Pool) -> None:
    for sizes in pool.run(2, evaluate_uneven):
        assert [sum(s) for s in sizes] == [7, 5, 3, 1]
        assert [len(s) for s in sizes] == [4, 4, 3, 1]
        assert all(min(s) >= 1 for s in sizes)
