"""Scripts that change parameters between steps: allowed changes on each rank, and refused ones."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from smp.tensor_parallel.sharding import interval_of, slice_of
from tests.dist.pool import Pool
from tests.harness import Config, Heard, Layers, train_step_of

WIDTH, STEPS, LIMIT = 6, 4, 0.3
LAYOUTS: dict[str, tuple[int, Config]] = {
    "replicas": (2, {}),
    "pipeline": (2, {"pipeline_parallel_degree": 2}),
    "sharded state": (2, {"shard_optimizer_state": True}),
    "sharded": (2, {"sharded_data_parallel_degree": 2}),
    "split": (2, {"tensor_parallel_degree": 2}),
    "pipeline and sharded": (
        4,
        {"pipeline_parallel_degree": 2, "sharded_data_parallel_degree": 2},
    ),
}
ABSENT = ["pipeline", "sharded", "pipeline and sharded"]
SHOWN = ["replicas", "sharded state"]


def made() -> Layers:
    """Makes a model whose second layer is frozen."""
    net = Layers(WIDTH)
    net.layers[1].requires_grad_(False)
    return net


def samples_of(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, WIDTH, generator=generator)


def wrapped(config: Config, net: nn.Module) -> Any:
    import smp

    sharded = "sharded_data_parallel_degree" in config
    clipping = {"sdp_gradient_clipping": 0.0} if sharded else {}
    smp.init({"ddp": True, "microbatches": 2, "auto_partition": False, **clipping, **config})
    if smp.tp_size() > 1:
        for layer in net.layers:  # type: ignore[union-attr]
            smp.set_tensor_parallelism(layer, True)
    model = smp.DistributedModel(net)
    if smp.pp_size() > 1:
        for layer in net.layers[2:]:  # type: ignore[index]
            smp.set_partition(layer, 1)
    return model


# ---- writes element by element -----------------------------------------------------------------


def masks() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(9)
    parameters = made().named_parameters()
    return {n: torch.rand(p.shape, generator=generator) > 0.2 for n, p in parameters}


def clip(parameter: nn.Parameter, _: Tensor) -> None:
    parameter.data.clamp_(-LIMIT, LIMIT)


def decay(parameter: nn.Parameter, _: Tensor) -> None:
    with torch.no_grad():
        parameter.mul_(0.999).sub_(torch.tensor(0.001))


def mask(parameter: nn.Parameter, kept: Tensor) -> None:
    parameter.data.mul_(kept)


def fill(parameter: nn.Parameter, kept: Tensor) -> None:
    parameter.data.masked_fill_(~kept, 0.125)


WRITES: list[Callable[[nn.Parameter, Tensor], None]] = [clip, decay, mask, fill]


def bound_after_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Hook of an optimizer that clips what it updates."""
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.clamp_(-LIMIT / 2, LIMIT / 2)


def plain_run(write: Any) -> dict[str, Tensor]:
    net, kept = made(), masks()
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    if write is decay:
        optimizer.register_step_post_hook(bound_after_update)
    for step in range(STEPS):
        optimizer.zero_grad()
        net(samples_of(step)).square().mean().backward()
        optimizer.step()
        for name, parameter in net.named_parameters():
            write(parameter, kept[name])
    return net.state_dict()


def run(rank: int, config: Config, write: Any) -> tuple[dict[str, Tensor], list[int]]:
    import smp

    kept = masks()
    model = wrapped(config, made())
    if smp.tp_size() > 1:
        kept = {
            n: slice_of(kept[n], interval_of(p)) for n, p in model.get_module().named_parameters()
        }
    theirs = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    if write is decay:
        theirs.register_step_post_hook(bound_after_update)
    optimizer = smp.DistributedOptimizer(theirs)
    train_step = train_step_of(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        train_step(samples_of(step).chunk(smp.dp_size())[smp.dp_rank()])
        optimizer.step()
        for name, parameter in model.get_module().named_parameters():
            write(parameter, kept[name])
    return model.state_dict(), [p.numel() for p in model.local_parameters()]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_writes_of_each_element_equal_one_process(pool: Pool, layout: str, write: Any) -> None:
    num_ranks, config = LAYOUTS[layout]
    expected = plain_run(write)
    for state, local in pool.run(num_ranks, run, config, write):
        assert state.keys() == expected.keys() and local
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
            assert value.abs().max() <= LIMIT or write is not clip


def keep_masters(rank: int, config: Config) -> dict[str, tuple[int, Tensor]]:
    import smp

    model = wrapped({"bf16": True, **config}, made())
    optimizer = smp.DistributedOptimizer(
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    )
    train_step = train_step_of(model)
    train_step(samples_of(0))
    optimizer.step()
    for _ in range(20):
        for parameter in model.get_module().parameters():
            decay(parameter, parameter)
    with torch.no_grad():
        for parameter in model.get_module().parameters():
            parameter.clamp_(max=LIMIT)
    train_step(samples_of(0))
    optimizer.step()
    from smp.precision.holdings import holding_of

    masters = {}
    for name, parameter in model.local_named_parameters():
        held = holding_of(parameter)
        if held is not None:
            assert torch.equal(held.piece, held.master.detach().to(torch.bfloat16))
            masters[name] = held.begin, held.master.detach().reshape(-1).clone()
    return masters


@pytest.mark.parametrize("layout", [*SHOWN, *ABSENT])
def test_writes_of_each_element_are_done_with_the_digits_of_masters(
    pool: Pool, layout: str
) -> None:
    net = made()
    for _ in range(20):
        for parameter in net.parameters():
            decay(parameter, parameter)
    expected = {n: p.detach().clamp(max=LIMIT).reshape(-1) for n, p in net.named_parameters()}
    assert any(value.max() == LIMIT for value in expected.values())
    num_ranks, config = LAYOUTS[layout]
    found = set()
    for masters in pool.run(num_ranks, keep_masters, config):
        for name, (begin, values) in masters.items():
            torch.testing.assert_close(values, expected[name][begin : begin + len(values)])
            found.add(name)
    assert found == {name for name, p in net.named_parameters() if p.requires_grad}


# ---- what needs values of other ranks ------------------------------------------------------------


def average(model: Any, ahead: Any) -> None:
    ahead.update_parameters(model.get_module())


def teach(model: Any, ahead: Any) -> None:
    for own, teacher in zip(model.parameters(), ahead.module.parameters(), strict=True):
        teacher.data.mul_(0.9).add_(own.data, alpha=0.1)


def teach_at_once(model: Any, ahead: Any) -> None:
    with torch.no_grad():
        torch._foreach_lerp_(list(ahead.module.parameters()), list(model.parameters()), 0.1)


def copy_model(model: Any, ahead: Any) -> None:
    ahead.module.load_state_dict(copy.deepcopy(model.get_module()).state_dict())


def penalise(model: Any, ahead: Any) -> None:
    total = sum(p.square().sum() for p in model.parameters())
    with torch.no_grad():
        for teacher in ahead.module.parameters():
            teacher.fill_(float(total))  # type: ignore[arg-type]


def prune(model: Any, ahead: Any) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(parameter.data.abs() > 0.1)
    copy_model(model, ahead)


def to_vector(model: Any, ahead: Any) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector.detach(), ahead.module.parameters())


READS: list[Callable[[Any, Any], None]] = [
    average,
    teach,
    teach_at_once,
    copy_model,
    penalise,
    prune,
    to_vector,
]


def read(rank: int, config: Config, code: Any) -> dict[str, Tensor]:
    import smp

    ahead = AveragedModel(made(), multi_avg_fn=None)
    model = wrapped(config, made())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train_step = train_step_of(model)
    for step in range(2):
        optimizer.zero_grad()
        train_step(samples_of(step).chunk(smp.dp_size())[smp.dp_rank()])
        optimizer.step()
        code(model, ahead)
    state: dict[str, Tensor] = ahead.module.state_dict()
    return state


def read_alone(code: Any) -> dict[str, Tensor]:
    ahead, net = AveragedModel(made()), made()
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)

    class Plain:
        parameters = net.parameters
        get_module = staticmethod(lambda: net)

    for step in range(2):
        optimizer.zero_grad()
        net(samples_of(step)).square().mean().backward()
        optimizer.step()
        code(Plain(), ahead)
    state: dict[str, Tensor] = ahead.module.state_dict()
    return state


@pytest.mark.parametrize("code", READS)
@pytest.mark.parametrize("layout", ABSENT[:2])
def test_reads_of_values_that_are_elsewhere_say_what_to_use(
    pool: Pool, layout: str, code: Any
) -> None:
    num_ranks, config = LAYOUTS[layout]
    for outcome in pool.outcomes(num_ranks, read, config, code):
        assert outcome.error == "RuntimeError"
        for words in ("has no values here", "smp.whole_parameters(model)", "model.state_dict()"):
            assert words in outcome.message
        assert "parameter 'layers." in outcome.message and "[global_rank" in outcome.message


@pytest.mark.parametrize("code", READS)
@pytest.mark.parametrize("layout", SHOWN)
def test_whole_parameters_are_read_as_in_one_process(pool: Pool, layout: str, code: Any) -> None:
    num_ranks, config = LAYOUTS[layout]
    expected = read_alone(code)
    for state in pool.run(num_ranks, read, config, code):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


def test_reads_that_meet_a_slice_say_so(pool: Pool) -> None:
    num_ranks, config = LAYOUTS["split"]
    for outcome in pool.outcomes(num_ranks, read, config, teach):
        assert outcome.error == "RuntimeError"
        for words in ("is split over tensor-parallel ranks", "smp.whole_parameters(model)"):
            assert words in outcome.message
        assert "[3, 6] of [6, 6] here" in outcome.message or "[6, 3] of" in outcome.message


def compute_numbers(rank: int, config: Config) -> list[str]:
    """Four lines compute with a slice as a whole; the others write, copy, or see the whole."""
    import smp

    heard = Heard("of which each tensor-parallel rank has a slice")
    model = wrapped(config, made())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train_step = train_step_of(model)
    for step in range(2):
        train_step(samples_of(step))
        optimizer.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.norm()
                copied = parameter.data.mul_(0.9).clone()
                assert copied.view(-1).numel() == parameter.numel()
                parameter.lerp_(parameter.cumsum(-1), 0.5)
                nn.init.normal_(parameter)
            torch._foreach_mul_(list(model.parameters()), 0.5)
            torch._foreach_norm(list(model.parameters()))
        with torch.no_grad(), smp.whole_parameters(model):
            for parameter in model.parameters():
                parameter.norm()
    model.state_dict()
    logging.getLogger("smp").removeHandler(heard)
    return heard.texts


def test_a_number_of_a_slice_is_told_once_for_each_line(pool: Pool) -> None:
    num_ranks, config = LAYOUTS["split"]
    texts, others = pool.run(num_ranks, compute_numbers, config)
    assert others == [] and len(texts) == 4, texts
    numbers = [re.search(r"\.py:\d+ computes a number .* from 'layers\.", t) for t in texts]
    mixed = [re.search(r"\.py:\d+ mixes or draws elements of 'layers\.", t) for t in texts]
    assert list(map(bool, numbers)) == [True, False, False, True]
    assert list(map(bool, mixed)) == [False, True, True, False]
    for text in texts:
        assert "`with smp.whole_parameters(model):`" in text
    assert pool.run(2, compute_numbers, {}) == [[], []]


def initialise_again(rank: int, config: Config) -> list[str]:

    heard = Heard("apply() meets")
    model = wrapped(config, made())
    train_step = train_step_of(model)
    train_step(samples_of(0))
    for _ in range(2):
        model.apply(lambda module: None)
    logging.getLogger("smp").removeHandler(heard)
    return heard.texts


def test_code_for_the_classes_before_wrapping_is_told_of_split_ones(pool: Pool) -> None:
    num_ranks, config = LAYOUTS["split"]
    texts, others = pool.run(num_ranks, initialise_again, config)
    assert others == [] and len(texts) == 1
    assert "'layers.0', which was a Linear" in texts[0] and "DistributedLinear now" in texts[0]
    assert pool.run(2, initialise_again, {}) == [[], []]


def penalise_in_step(rank: int, config: Config) -> None:
    import smp

    model = wrapped(config, made())

    @smp.step
    def train_step(x: Tensor) -> None:
        loss = model(x).square().mean()
        for parameter in model.parameters():
            loss = loss + parameter.abs().sum()
        model.backward(loss)

    train_step(samples_of(0))


def test_a_penalty_over_values_that_are_elsewhere_is_refused(pool: Pool) -> None:
    num_ranks, config = LAYOUTS["pipeline"]
    env = {"SMP_CHECK_FIRST_STEP": "0"}
    outcomes = pool.outcomes(num_ranks, penalise_in_step, config, env=env)
    assert all(outcome.error for outcome in outcomes)
    assert any("has no values here" in outcome.message for outcome in outcomes)


def draw(parameter: nn.Parameter) -> None:
    nn.init.normal_(parameter)


def write_row(parameter: nn.Parameter) -> None:
    parameter.data[0] = 0.0


def at_once(parameter: nn.Parameter) -> None:
    torch._foreach_mul_([parameter.data], 0.5)


def other_memory(parameter: nn.Parameter) -> None:
    parameter.data = torch.zeros(parameter.shape)


def write(rank: int, config: Config, code: Any) -> str:

    model = wrapped(config, made())
    train_step = train_step_of(model)
    train_step(samples_of(0))
    message = ""
    for parameter in model.parameters():
        try:
            code(parameter)
        except RuntimeError as error:
            message = str(error)
    return message


@pytest.mark.parametrize("code", [draw, write_row, at_once, other_memory])
@pytest.mark.parametrize("layout", ABSENT[:2])
def test_other_writes_say_what_to_use(pool: Pool, layout: str, code: Any) -> None:
    num_ranks, config = LAYOUTS[layout]
    for message in pool.run(num_ranks, write, config, code):
        assert "smp.whole_parameters(model)" in message and "'layers." in message
        assert "elements" in message and "[global_rank" in message


# ---- whole parameters --------------------------------------------------------------------------


def rotate(parameters: dict[str, nn.Parameter]) -> None:
    """Needs all elements of a matrix, and of another one."""
    with torch.no_grad():
        weights = [p for name, p in parameters.items() if name.endswith("weight")]
        for first, second in zip(weights, weights[1:], strict=False):
            first.data.copy_(torch.linalg.qr(first + second)[0])
        weights[-1].data = weights[-1].flip(0) / weights[-1].norm()


def plain_rotation() -> list[dict[str, Tensor]]:
    net, states = made(), []
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        net(samples_of(step)).square().mean().backward()
        optimizer.step()
        rotate(dict(net.named_parameters()))
        states.append(copy.deepcopy(net.state_dict()))
    return states


def run_rotation(rank: int, config: Config) -> list[dict[str, Tensor]]:
    import smp

    model = wrapped(config, made())
    plain = model.get_module()
    optimizer = smp.DistributedOptimizer(
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    )
    train_step = train_step_of(model)
    states = []
    for step in range(STEPS):
        optimizer.zero_grad()
        train_step(samples_of(step).chunk(smp.dp_size())[smp.dp_rank()])
        optimizer.step()
        before = model.state_dict()
        with smp.whole_parameters(model):
            parameters = dict(plain.named_parameters())
            for name, parameter in parameters.items():
                torch.testing.assert_close(parameter.detach(), before[name], rtol=0, atol=0)
            rotate(parameters)
            inside = {name: p.detach().clone() for name, p in parameters.items()}
        states.append({name: value.clone() for name, value in model.state_dict().items()})
        for name, value in inside.items():
            torch.testing.assert_close(states[-1][name], value, rtol=0, atol=0)
    return states


def test_what_is_written_to_whole_parameters_stays(pool: Pool) -> None:
    expected = plain_rotation()
    for num_ranks, config in LAYOUTS.values():
        for states in pool.run(num_ranks, run_rotation, config):
            for state, plain in zip(states, expected, strict=True):
                for name, value in plain.items():
                    torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)


def show_some(rank: int, config: Config) -> dict[str, str]:
    import smp
    from smp.modules.materialize import is_placeholder

    model = wrapped(config, made())
    plain = model.get_module()
    train_step = train_step_of(model)
    train_step(samples_of(0))
    messages: dict[str, str] = {}

    def note(name: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except (RuntimeError, ValueError) as error:
            messages[name] = str(error)

    first, last = plain.layers[0], plain.layers[3]
    with smp.whole_parameters(model, [last.weight]):
        assert not is_placeholder(last.weight) and last.weight.norm() > 0
        assert is_placeholder(first.weight) or smp.pp_rank() == 0
        note("stranger", lambda: smp.whole_parameters(model, [torch.ones(2)]).__enter__())
    before = model.state_dict()
    with pytest.raises(KeyError), smp.whole_parameters(model):
        raise KeyError
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)

    @smp.step
    def wrong_step(x: Tensor) -> None:
        smp.whole_parameters(model)

    if smp.pp_size() == 1:
        note("wrong", lambda: wrong_step(samples_of(0)))
    else:
        with smp.whole_parameters(model):
            note("wrong", lambda: train_step(samples_of(0)))
    return messages


@pytest.mark.parametrize("layout", ABSENT[:2])
def test_some_parameters_are_whole_and_misuse_is_named(pool: Pool, layout: str) -> None:
    num_ranks, config = LAYOUTS[layout]
    for messages in pool.run(num_ranks, show_some, config):
        assert "not parameters of the model" in messages["stranger"]
        wrong = "runs inside of smp.whole_parameters"
        if layout == "sharded":
            wrong = "smp.whole_parameters was called inside step"
        assert wrong in messages["wrong"]


def enter_on_one_rank(rank: int) -> None:
    import smp

    model = wrapped({}, made())
    if rank == 0:
        with smp.whole_parameters(model):
            pass
    smp.barrier()


def test_a_context_that_only_one_rank_enters_is_told(pool: Pool) -> None:
    outcomes = pool.outcomes(2, enter_on_one_rank)
    assert all(outcome.error for outcome in outcomes)
    assert "smp.whole_parameters" in outcomes[0].message
