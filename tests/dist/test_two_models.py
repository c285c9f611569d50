"""Several wrapped models in one process give the numbers of one process."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist import two_models
from tests.dist.pool import Pool
from tests.dist.training import SCHEDULES, local_parameters
from tests.dist.two_models import PROGRAMS, WIDTH, Run, check_runs, make_models
from tests.reference.tolerances import assert_close


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("layout", [(2, 1), (4, 1), (2, 2)])
def test_numbers_equal_one_process(pool: Pool, layout: tuple[int, int], schedule: str) -> None:
    check_runs(pool, [Run(case, *layout, schedule) for case in PROGRAMS])


def test_replicas_without_a_pipeline_reduce_several_models(pool: Pool) -> None:
    check_runs(pool, [Run(case, 1, 2) for case in PROGRAMS])


def test_schedules_that_wait_for_a_chain_do_not_wait_for_two(pool: Pool) -> None:
    runs = [Run(case, 2, 1, "zero_bubble") for case in ("chain", "adversaries")]
    stages = (("virtual_stages", 2),)
    runs += [Run(case, 2, 1, "virtual_interleaved", stages) for case in ("chain", "alternate")]
    check_runs(pool, runs)


def test_replicas_follow_one_order(pool: Pool) -> None:
    ordered = (("deterministic_server", True),)
    check_runs(pool, [Run(case, 2, 2, config=ordered) for case in ("alternate", "adversaries")])


@pytest.mark.parametrize("layout", [(1, 2), (2, 2)])
def test_replicas_with_other_numbers_of_microbatches(pool: Pool, layout: tuple[int, int]) -> None:
    """Checks that all samples count alike, in every replica."""
    runs = [Run("chain", *layout, rows=rows) for rows in ((8, 3), (1, 7), (2, 4))]
    check_runs(pool, runs)


# ---- calls that name no model ---------------------------------------------------------


def start(pp: int, dp: int = 1, **keys: Any) -> None:
    import smp

    smp.init({"pipeline_parallel_degree": pp, "microbatches": 2, "ddp": dp > 1} | keys)


def make_step(models: list[Any]) -> Any:
    import smp

    @smp.step
    def step(x: Tensor) -> Tensor:
        h = x
        for model in models:
            h = model(h)
        loss = h.square().mean()
        models[-1].backward(loss)
        return loss

    return step


def error_of(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def ask_without_a_name(rank: int, folder: str) -> dict[str, Any]:
    import smp

    start(2)
    models = [smp.DistributedModel(model) for model in make_models()]
    make_step(models)(torch.ones(4, WIDTH, dtype=torch.float64))
    told = {
        "explain": error_of(smp.explain_partition),
        "explain a module": error_of(lambda: smp.explain_partition("0.layers.1")),
        "save": error_of(lambda: smp.save_partition(f"{folder}/plan")),
    }
    smp.save_partition(f"{folder}/plan1", model=models[1])
    names = [smp.explain_partition("1.layers.0", model=model).module for model in models]
    return {"errors": told, "names": names}


def test_calls_that_name_no_model_raise_and_list_the_candidates(pool: Pool, tmp_path: Any) -> None:
    for result in pool.run(2, ask_without_a_name, str(tmp_path)):
        for call, text in result["errors"].items():
            assert text.startswith("RuntimeError"), (call, text)
            assert "0: Sequential of" in text and "1: Sequential of" in text, (call, text)
        assert all(result["names"])
    assert (tmp_path / "plan1").is_file() and not (tmp_path / "plan").exists()


def use_a_file(rank: int, path: str) -> list[str]:
    import smp

    start(2, partition_file=path)
    models = [smp.DistributedModel(model) for model in make_models()]
    step = make_step(models)
    return [error_of(lambda: step(torch.ones(4, WIDTH, dtype=torch.float64)))]


def test_a_partition_file_cannot_be_meant_for_two(pool: Pool, tmp_path: Any) -> None:
    for (text,) in pool.run(2, use_a_file, str(tmp_path / "plan")):
        assert "partition_file is for one model" in text and "1: Sequential of" in text, text


def share_parameters(rank: int, pp: int) -> str:
    import smp

    start(pp, 2 // pp)
    first, second = make_models()
    second[1] = first[0]
    _kept = smp.DistributedModel(first)
    return error_of(lambda: smp.DistributedModel(second))


@pytest.mark.parametrize("pp", [1, 2])
def test_models_that_share_parameters_are_refused_with_both_names(pool: Pool, pp: int) -> None:
    for text in pool.run(2, share_parameters, pp):
        assert text.startswith("ValueError") and "'1.layers.0.weight' is '0.layers.0" in text, text


def use_late(rank: int) -> list[str]:
    """The second call of a step function uses a model that the first did not."""
    import smp

    start(2)
    first, second = (smp.DistributedModel(model) for model in make_models())

    @smp.step
    def step(x: Tensor, with_second: bool) -> None:
        y = first(x)
        if with_second:
            y = second(y)
        first.backward(y.mean())

    x = torch.ones(4, WIDTH, dtype=torch.float64)
    step(x, False)
    return [error_of(lambda: step(x, True))]


def test_a_model_that_is_used_too_late_raises_with_the_remedy(pool: Pool) -> None:
    outcomes = pool.outcomes(2, use_late)
    texts = [str(outcome.value) for outcome in outcomes]
    assert any("is not partitioned yet; call it in the first call" in text for text in texts), texts


def call_in_another_order(rank: int) -> None:
    import smp

    start(2)
    first, second = (smp.DistributedModel(model) for model in make_models())

    @smp.step
    def step(x: Tensor) -> None:
        order = [first, second] if smp.pp_rank() == 0 or smp.is_tracing() else [second, first]
        losses = [model(x).mean() for model in order]
        first.backward(losses[0] + losses[1])

    step(torch.ones(4, WIDTH, dtype=torch.float64))


def test_ranks_that_call_models_in_another_order_are_told(pool: Pool) -> None:
    outcomes = pool.outcomes(2, call_in_another_order)
    assert all(outcome.error for outcome in outcomes)
    texts = [str(outcome.message) for outcome in outcomes]
    assert any("but model 0 on the first pipeline rank" in text for text in texts), texts


# ---- hooks, state ---------------------------------------------------------------------


def save_and_load(rank: int) -> list[Any]:
    import smp

    start(2)
    models = [smp.DistributedModel(model) for model in make_models()]
    inner = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
    both = smp.DistributedOptimizer(
        torch.optim.Adam([p for model in models for p in model.parameters()], lr=0.01)
    )
    optimizers = [smp.DistributedOptimizer(optimizer) for optimizer in inner]
    seen: list[Any] = []
    for model in models:
        model.register_post_partition_hook(lambda m, o: seen.append((m is models[0], o)))
    step = make_step(models)
    x = torch.linspace(-1, 1, 4 * WIDTH, dtype=torch.float64).view(4, WIDTH)
    step(x)
    for optimizer in (*optimizers, both):
        optimizer.step()
    hooks = [(is_first, optimizers.index(o)) for is_first, o in seen]
    whole = [copy.deepcopy(model.state_dict()) for model in models]
    local = [copy.deepcopy(model.local_state_dict()) for model in models]
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in (*optimizers, both)]
    for model in models:
        with torch.no_grad():
            for parameter in model.local_parameters():
                parameter.zero_()
    models[0].load_state_dict(whole[0])
    models[1].load_state_dict(local[1])
    after = [model.state_dict() for model in models]
    for optimizer, state in zip((*optimizers, both), states, strict=True):
        optimizer.load_state_dict(state)
    again = [optimizer.state_dict() for optimizer in (*optimizers, both)]
    return [hooks, whole, after, states, again, [len(part) for part in local]]


def test_states_of_each_model_and_optimizer_are_saved_and_loaded(pool: Pool) -> None:
    results = pool.run(2, save_and_load)
    keys = [set(model.state_dict()) for model in make_models()]
    sizes = [len(list(model.parameters())) for model in make_models()]
    for hooks, whole, after, states, again, num_local in results:
        assert hooks == [(True, 0), (False, 1)], "each hook gets the optimizer of its model"
        for expected, before, now in zip(keys, whole, after, strict=True):
            assert set(before) == expected
            assert_close(now, before, torch.float64, "parameters that were saved and loaded")
            assert all(t.isfinite().all() for t in before.values())
        for size, before, now in zip((*sizes, sum(sizes)), states, again, strict=True):
            assert len(before["state"]) == size, "moments of all parameters"
            for idx, entry in before["state"].items():
                assert torch.equal(entry["exp_avg"], now["state"][idx]["exp_avg"])
        assert 0 < min(num_local)
    for idx in (0, 1):
        assert sum(r[5][idx] - 1 for r in results) == len(keys[idx])  # one entry is the mark


def distil_gpt2(rank: int, pp: int) -> list[Any]:
    """Teacher and student of the same family, whose outputs are objects; `pp` 0 is plain."""
    from transformers import GPT2Config, GPT2LMHeadModel

    models: list[Any] = []
    for layers in (4, 2):
        torch.manual_seed(layers)
        config = GPT2Config(
            n_layer=layers, n_embd=16, n_head=2, vocab_size=40, n_positions=12, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        models.append(GPT2LMHeadModel(config).double())
    ids = torch.arange(48).reshape(4, 12) * 7 % 40

    def loss_of(teacher: Any, student: Any, piece: Tensor) -> Tensor:
        with torch.no_grad():
            target = teacher(input_ids=piece).logits.softmax(-1)
        output = student(input_ids=piece, labels=piece)
        soft = nn.functional.kl_div(output.logits.log_softmax(-1), target, reduction="batchmean")
        return output.loss + soft  # type: ignore[no-any-return]

    if pp == 0:
        loss = torch.stack([loss_of(*models, piece) for piece in ids.chunk(2)]).mean()
        loss.backward()
        return [loss.item(), {n: p.grad for n, p in models[1].named_parameters()}]
    import smp

    start(pp)
    teacher, student = (smp.DistributedModel(model) for model in models)

    @smp.step
    def step(piece: Tensor) -> Tensor:
        loss = loss_of(teacher, student, piece)
        student.backward(loss)
        return loss

    for _ in range(2):
        student.zero_grad()
        output = step(ids)
    grads = {name: p.grad for name, p in local_parameters(student).items()}
    assert all(p.grad is None for p in teacher.local_parameters())
    return [output.reduce_mean().item(), grads, len(local_parameters(teacher))]


def test_a_gpt2_is_distilled_from_a_larger_one(pool: Pool) -> None:
    loss, grads = distil_gpt2(0, 0)
    merged: dict[str, Any] = {}
    for got, part, num_of_teacher in pool.run(2, distil_gpt2, 2):
        assert got == pytest.approx(loss, rel=1e-10)
        assert part and num_of_teacher > 0
        merged.update(part)
    assert_close(merged, grads, torch.float64, "gradients of the student")


def record(rank: int, path: str) -> list[Any]:
    import smp

    start(2)
    models = [smp.DistributedModel(model) for model in make_models()]
    step = make_step(models)
    x = torch.ones(4, WIDTH, dtype=torch.float64)
    step(x)
    with smp.trace(path):
        step(x)
    return list(smp.world.runtime.current().server.module_names)


def test_the_timeline_names_modules_with_the_number_of_their_model(
    pool: Pool, tmp_path: Any
) -> None:
    results = pool.run(2, record, str(tmp_path / "trace"))
    assert results[0] == results[1]
    assert {"", "1.layers.0", "1:(root)", "1:1.layers.0"} <= set(results[0])
    texts = [path.read_text() for path in tmp_path.rglob("*.json")]
    assert any('"1:' in text or " 1:" in text for text in texts), "boxes of the second model"


def raise_between(rank: int) -> list[Any]:
    """The step function cannot go on with zeros after its first call; it can with numbers."""
    import logging

    import smp

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda entry: lines.append(entry.getMessage())  # type: ignore[method-assign]
    logging.getLogger("smp").addHandler(handler)
    start(2)
    first, second = (smp.DistributedModel(model) for model in make_models())

    @smp.step
    def step(x: Tensor) -> Tensor:
        y = first(x)
        if y.abs().sum().item() == 0:
            raise ValueError("nothing but zeros")
        loss = second(y).square().mean()
        first.backward(loss)
        return loss

    losses = step(torch.ones(4, WIDTH, dtype=torch.float64)).outputs
    logging.getLogger("smp").removeHandler(handler)
    told = [line for line in lines if "nothing but zeros" in line]
    return [losses[0].item(), told, second.partitioned, len(local_parameters(second))]


def test_a_function_that_needs_numbers_between_its_calls_is_told_and_works(pool: Pool) -> None:
    first, second = make_models()
    x = torch.ones(2, WIDTH, dtype=torch.float64)
    expected = second(first(x)).square().mean().item()
    for rank, (loss, told, partitioned, num_local) in enumerate(pool.run(2, raise_between)):
        assert loss == pytest.approx(expected, rel=1e-10)
        assert partitioned and num_local > 0
        assert len(told) == (1 if rank == 0 else 0) and all("1 of 2 models" in t for t in told)


# ---- life -----------------------------------------------------------------------------


def live_and_die(rank: int, pp: int, dp: int, is_sharded: bool, checkpoints: bool) -> list[Any]:
    """Models come and go; garbage is collected on one rank only."""
    import gc
    import weakref

    import smp

    gc.disable()
    start(pp, dp, shard_optimizer_state=is_sharded)
    x = torch.linspace(-1, 1, 4 * WIDTH, dtype=torch.float64).view(4, WIDTH)
    keeper = smp.DistributedModel(make_models(1)[0])
    gone: list[Any] = []
    counts: list[int] = []
    for round_idx in range(3):
        other = smp.DistributedModel(make_models(2, seed=round_idx)[1])
        if checkpoints:
            smp.set_activation_checkpointing(other.get_module())
        weight = next(other.get_module().parameters())
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1))
        make_step([keeper, other])(x)
        optimizer.step()
        gone.append((weakref.ref(other), weakref.ref(other.get_module()), weakref.ref(weight)))
        del other, optimizer, weight
        if rank == 0:
            gc.collect()
        keeper.zero_grad()
        make_step([keeper])(x)  # the others may still have it
        counts.append(len(smp.world.runtime.current().wrapped.models))
    gc.collect()
    gc.enable()
    dead = [[reference() is None for reference in references] for references in gone]
    local = local_parameters(keeper)
    grads = {} if is_sharded else {n: p.grad.clone() for n, p in local.items()}
    return [dead, counts, grads]


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize(
    ("layout", "is_sharded"), [((2, 1), False), ((2, 2), False), ((1, 2), False), ((1, 2), True)]
)
def test_models_are_garbage_when_the_program_lets_go(
    pool: Pool, layout: tuple[int, int], is_sharded: bool, checkpoints: bool
) -> None:
    options = (is_sharded, checkpoints)
    results = pool.run(layout[0] * layout[1], live_and_die, *layout, *options)
    plain = make_models(1)[0]
    x = torch.linspace(-1, 1, 4 * WIDTH, dtype=torch.float64).view(4, WIDTH)
    plain(x).square().mean().backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    merged: dict[str, Any] = {}
    for dead, _, grads in results:
        assert dead == [[True] * 3] * 3, "models, modules and parameters are gone"
        merged.update(grads)
    if not is_sharded:  # else they are with the optimizer, which the model that stays has not
        assert_close(merged, expected, torch.float64, "gradients of the model that stayed")


def keep_own_forward(rank: int) -> list[Any]:
    """The user's own ``forward`` on instances outlives the pipeline."""
    import smp

    start(2, auto_partition=False, default_partition=0)
    plain = make_models(1)[0]

    def doubled(x: Tensor) -> Tensor:
        return 2.0 * type(plain[3]).forward(plain[3], x)

    def tripled(x: Tensor) -> Tensor:
        return 3.0 * type(plain[2]).forward(plain[2], x)

    plain[3].forward = doubled
    for idx in (1, 2, 3):
        smp.set_partition(plain[idx], 1)
    model = smp.DistributedModel(plain)
    loss = make_step([model])(torch.ones(4, WIDTH, dtype=torch.float64)).reduce_mean()
    plain[2].forward = tripled  # after the partition
    model.cpu()
    own = [vars(module).get("forward") for module in plain]
    return [loss.item(), own == [None, None, tripled, doubled]]


def test_a_forward_on_an_instance_is_there_again_after_the_pipeline(pool: Pool) -> None:
    plain = make_models(1)[0]
    x = torch.ones(4, WIDTH, dtype=torch.float64)
    expected = (2.0 * plain(x)).square().mean().item()
    for loss, is_restored in pool.run(2, keep_own_forward):
        assert loss == pytest.approx(expected, rel=1e-10)
        assert is_restored


def wrap_again(_: int, adds_a_module: bool) -> float:
    """Evaluates with one wrapper, and trains with a second one."""
    import smp

    start(2)
    plain = make_models(1)[0]
    first = [smp.DistributedModel(plain)]

    @smp.step
    def evaluate(x: Tensor) -> Tensor:
        return first[0](x)

    with torch.no_grad():
        evaluate(torch.ones(4, WIDTH, dtype=torch.float64))
    first.clear()
    gc.collect()
    if adds_a_module:
        plain.append(nn.Identity())
    model = smp.DistributedModel(plain)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step = make_step([model])
    step(torch.ones(4, WIDTH, dtype=torch.float64))
    optimizer.step()
    num_local = sum(1 for _ in model.local_parameters())
    assert 0 < num_local < len(list(plain.parameters()))
    return float(step(torch.ones(4, WIDTH, dtype=torch.float64)).reduce_mean())


def test_a_model_that_is_wrapped_a_second_time_keeps_its_partition(pool: Pool) -> None:
    plain, x = make_models(1)[0], torch.ones(4, WIDTH, dtype=torch.float64)
    plain(x).square().mean().backward()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter -= 0.1 * parameter.grad
    expected = plain(x).square().mean().item()
    assert pool.run(2, wrap_again, False) == pytest.approx([expected] * 2, rel=1e-10)
    for outcome in pool.outcomes(2, wrap_again, True):
        assert "was wrapped before with" in outcome.message


def evaluate_beside_idle(_: int) -> list[float]:
    """Trains and evaluates a model while another one is wrapped that no step function calls."""
    import smp

    start(2)
    first, idle = make_models(2)
    model, _idle = smp.DistributedModel(first), smp.DistributedModel(idle)
    x = torch.ones(4, WIDTH, dtype=torch.float64)
    losses = [float(make_step([model])(x).reduce_mean())]

    @smp.step
    def evaluate(x: Tensor) -> Tensor:
        return model(x).square().mean()

    with torch.no_grad():
        losses += [float(evaluate(x).reduce_mean()) for _ in range(2)]
    return losses


def test_another_step_function_runs_beside_a_model_that_none_calls(pool: Pool) -> None:
    plain, x = make_models(1)[0], torch.ones(4, WIDTH, dtype=torch.float64)
    expected = plain(x).square().mean().item()
    for losses in pool.run(2, evaluate_beside_idle):
        assert losses == pytest.approx([expected] * 3, rel=1e-10)


def test_the_programs_use_all_their_models() -> None:
    """Checks the test itself: no model is idle in its program."""
    for name, program in PROGRAMS.items():
        models = make_models(program.num_models)
        called: set[Any] = set()
        for model in models:
            model.register_forward_hook(lambda module, *_, called=called: called.add(module))
        for body, _ in program.bodies:
            body(models, lambda _, loss: loss.backward(), two_models.make_batch(0, 0))
        assert called == set(models), name
