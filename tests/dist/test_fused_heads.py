"""Language models with ``fused_linear_cross_entropy``, against the plain script on whole logits."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.dist.pool import Pool, RankFailure
from tests.dist.test_loss_weights import gpt2
from tests.losses.running import plain_names

Config = dict[str, Any]
Batch = dict[str, Tensor]
KEY = {"fused_linear_cross_entropy": True}
SAMPLES, LENGTH, VOCABULARY, IGNORED = 8, 12, 31, -100

LAYOUTS: dict[str, tuple[int, Config]] = {
    "one process": (1, {}),
    "pipeline": (2, {"pipeline_parallel_degree": 2}),
    "pipeline, forwards first": (2, {"pipeline_parallel_degree": 2, "pipeline": "simple"}),
    "pipeline, one at a time": (2, {"pipeline_parallel_degree": 2, "active_microbatches": 1}),
    "replicas": (2, {}),
    "sharded": (
        2,
        {
            "sharded_data_parallel_degree": 2,
            "sdp_param_persistence_threshold": 0,
            "sdp_gradient_clipping": 0.0,
        },
    ),
    "sharded state": (2, {"shard_optimizer_state": True}),
    "own batches": (2, {"tensor_parallel_degree": 2}),
    "own batches, speed": (2, {"tensor_parallel_degree": 2, "optimize": "speed"}),
    "common batch": (2, {"tensor_parallel_degree": 2, "prescaled_batch": True}),
    "pipeline and replicas": (4, {"pipeline_parallel_degree": 2}),
    "pipeline and sharded": (
        4,
        {
            "pipeline_parallel_degree": 2,
            "sharded_data_parallel_degree": 2,
            "sdp_param_persistence_threshold": 0,
            "sdp_gradient_clipping": 0.0,
        },
    ),
    "pipeline and own batches": (4, {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2}),
}


SIZES: dict[str, Any] = {
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 16,
    "intermediate_size": 24, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH,
    "use_cache": False,
}  # fmt: skip


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(4)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).double()


def qwen3() -> nn.Module:
    """Returns a model that tensor parallelism splits by the plan of transformers."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(5)
    config = Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=False)
    return Qwen3ForCausalLM(config).double()


MODELS = {"gpt2": gpt2, "llama": llama, "qwen3": qwen3}


def batch(num_empty: int = 0) -> Batch:
    """Sequences of very different lengths, labels ignored behind the end, and in the first ones."""
    generator = torch.Generator().manual_seed(100)
    ids = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    lengths = torch.randint(2, LENGTH + 1, (SAMPLES,), generator=generator)
    mask = torch.arange(LENGTH)[None] < lengths[:, None]
    counted = mask & (torch.arange(SAMPLES) >= num_empty)[:, None]
    return {
        "input_ids": ids,
        "attention_mask": mask.long(),
        "labels": ids.masked_fill(~counted, IGNORED),
    }


def plain_loss(model: nn.Module, given: Mapping[str, Tensor]) -> Tensor:
    """Returns the loss from whole logits, in float64."""
    logits = model(given["input_ids"], attention_mask=given["attention_mask"]).logits
    rows = logits[:, :-1].reshape(-1, VOCABULARY)
    return F.cross_entropy(rows, given["labels"][:, 1:].reshape(-1), ignore_index=IGNORED)


def wrapped(kind: str, config: Config) -> Any:
    import smp

    smp.init({"ddp": True, "microbatches": 2, **KEY, **config})
    plain = MODELS[kind]()
    if "bf16" in config or "fp16" in config:
        plain = plain.float()  # masters are float32
    if smp.tp_size() > 1:
        smp.set_tensor_parallelism(plain, True)
    return smp.DistributedModel(plain)


def own_part(prescaled: bool, num_empty: int = 0) -> Batch:
    import smp

    number, count = (
        (smp.rdp_rank(), smp.rdp_size()) if prescaled else (smp.dp_rank(), smp.dp_size())
    )
    per_rank = SAMPLES // count
    return {k: v[number * per_rank : (number + 1) * per_rank] for k, v in batch(num_empty).items()}


def train(
    rank: int, kind: str, config: Config, num_empty: int = 0
) -> tuple[float, dict[str, Tensor], str]:
    """Makes an update by SGD; returns the loss, the state, and the class of the head."""
    import smp

    model = wrapped(kind, config)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))

    @smp.step
    def step(own: Batch) -> Tensor:
        output = model(**own)
        with pytest.raises(RuntimeError, match="fused_linear_cross_entropy"):
            output.logits  # noqa: B018
        model.backward(output.loss)
        return output.loss

    own = own_part(config.get("prescaled_batch", False), num_empty)
    mean = step(own).reduce_mean().detach().double()
    optimizer.step()
    losses = smp.allgather(float(mean), smp.WORLD)
    state = plain_names(model.state_dict(), MODELS[kind]())
    head = type(model.get_module().lm_head).__name__
    return sum(losses) / len(losses), state, head


HEADS = {
    ("gpt2", True): "VocabularyHead",
    ("llama", True): "FusedPlannedHead",
    ("qwen3", True): "FusedPlannedHead",
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", MODELS)
def test_training_equals_the_plain_script_on_the_whole_batch(
    pool: Pool, kind: str, layout: str
) -> None:
    size, config = LAYOUTS[layout]
    compare(kind, config, pool.run(size, train, kind, config), 0)


@pytest.mark.parametrize("layout", ["one process", "pipeline", "own batches", "common batch"])
@pytest.mark.parametrize("kind", MODELS)
def test_pieces_without_labels_add_nothing(pool: Pool, kind: str, layout: str) -> None:
    size, config = LAYOUTS[layout]
    compare(kind, config, pool.run(size, train, kind, config, SAMPLES // 2), SAMPLES // 2)


def compare(
    kind: str, config: Config, found: list[tuple[float, dict[str, Tensor], str]], num_empty: int
) -> None:
    """Compares results of `train` with the plain script on the whole batch."""
    plain = MODELS[kind]()
    begin = {name: value.clone() for name, value in plain.state_dict().items()}
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
    want = plain_loss(plain, batch(num_empty))
    want.backward()
    optimizer.step()
    largest = max(float((v - begin[n]).abs().max()) for n, v in plain.state_dict().items())
    for loss, state, head in found:
        assert head == HEADS.get((kind, "tensor_parallel_degree" in config), "FusedHead")
        # Losses of transformers are float32.
        if num_empty == 0:  # the mean over ranks is one of samples
            assert loss == pytest.approx(want.item(), rel=1e-6)
        for name, value in plain.state_dict().items():
            error = float((state[name] - value).abs().max()) / largest
            assert error < 1e-6, f"{name}: {error}"


# ---- logits


def from_attribute(output: Any) -> Any:
    return output.logits


def from_key(output: Any) -> Any:
    return output["logits"]


def from_position(output: Any) -> Any:
    return output[1]


def from_slice(output: Any) -> Any:
    return output[:2]


def from_iteration(output: Any) -> Any:
    return list(output.values())


def from_tuple(output: Any) -> Any:
    _, logits, *_ = output.to_tuple()
    return logits.argmax(-1)


READERS = (from_attribute, from_key, from_position, from_slice, from_iteration, from_tuple)


def read_logits(rank: int, kind: str, config: Config, trains: bool) -> list[str]:
    """Returns the errors of all ways to read logits."""
    import smp

    model = wrapped(kind, {**config, "microbatches": 1}).train(trains)
    found: list[str] = []

    @smp.step
    def step(own: Batch) -> Tensor:
        found.clear()
        with torch.set_grad_enabled(trains):
            output = model(**own)
            for read in READERS:
                try:
                    read(output)
                    found.append(read.__name__)
                except RuntimeError as error:
                    found.append(str(error))
            if trains:
                model.backward(output.loss)
        return output.loss

    step(own_part(False))
    return found


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("gpt2", "one process"),
        ("llama", "pipeline"),
        ("gpt2", "own batches"),
        ("qwen3", "own batches"),
    ],
)
def test_reading_the_logits_of_a_loss_is_an_error_that_says_what_to_do(
    pool: Pool, kind: str, layout: str, trains: bool
) -> None:
    size, config = LAYOUTS[layout]
    for errors in pool.run(size, read_logits, kind, config, trains):
        assert len(errors) == len(READERS)
        for text in errors:
            assert "call the model without labels" in text, text
            assert "set fused_linear_cross_entropy to False" in text, text


def without_labels(rank: int, kind: str, config: Config) -> Tensor:
    import smp

    model = wrapped(kind, config)
    model.eval()

    @smp.step
    def step(ids: Tensor) -> Tensor:
        logits: Tensor = model(ids).logits
        assert type(logits) is not str and logits.shape == (*ids.shape, VOCABULARY)
        return logits * 1

    with torch.no_grad():
        outputs = step(own_part(False)["input_ids"])
    found: Tensor = torch.cat(list(outputs.outputs)).detach()
    return found


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("layout", ["one process", "pipeline", "own batches"])
def test_without_labels_there_are_logits(pool: Pool, kind: str, layout: str) -> None:
    size, config = LAYOUTS[layout]
    with torch.no_grad():
        want = MODELS[kind]()(batch()["input_ids"]).logits
    found = pool.run(size, without_labels, kind, config)
    logits = torch.cat(found) if "tensor_parallel_degree" in config else found[0]
    torch.testing.assert_close(logits, want, rtol=1e-6, atol=1e-6)


def outputs_of_steps(rank: int, config: Config) -> None:
    """Returns a whole output from a step function, which joins the logits of microbatches."""
    import smp

    model = wrapped("llama", config)

    @smp.step
    def step(own: Batch) -> Any:
        output = model(**own)
        model.backward(output.loss)
        return output

    with pytest.raises(RuntimeError, match="call the model without labels"):
        step(own_part(False))


@pytest.mark.parametrize("layout", ["one process", "pipeline"])
def test_an_output_that_a_step_function_returns_is_read(pool: Pool, layout: str) -> None:
    size, config = LAYOUTS[layout]
    pool.run(size, outputs_of_steps, config)


# ---- other callers


def with_sums(rank: int) -> None:
    model = wrapped("llama", {"microbatches": 1})
    own = batch()
    count = (own["labels"][:, 1:] != IGNORED).sum()
    loss = model(**own, num_items_in_batch=count * 2).loss
    want = plain_loss(llama(), own) / 2
    torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=0)
    by_number = model(**own, num_items_in_batch=int(count) * 2).loss
    torch.testing.assert_close(by_number.double(), want, rtol=1e-6, atol=0)


def test_losses_may_be_sums_over_a_number_of_items(pool: Pool) -> None:
    pool.run(1, with_sums)


def of_copies(rank: int) -> None:
    model = wrapped("llama", {"microbatches": 1})
    own = batch()
    for twin in (copy.deepcopy(model.get_module()), pickle.loads(pickle.dumps(model.get_module()))):
        with torch.no_grad():
            twin.lm_head.weight.mul_(0)
        loss = twin(**own).loss
        torch.testing.assert_close(loss, torch.tensor(float(VOCABULARY)).log())
        loss.backward()
        assert twin.lm_head.weight.grad.abs().max() > 0
    torch.testing.assert_close(
        model(**own).loss.double(), plain_loss(llama(), own), rtol=1e-6, atol=0
    )


def test_copies_of_the_module_have_heads_of_their_own(pool: Pool) -> None:
    pool.run(1, of_copies)


def narrow(rank: int, config: Config) -> float:
    import smp

    model = wrapped("llama", config)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))

    @smp.step
    def step(own: Batch) -> Tensor:
        loss = model(**own).loss
        model.backward(loss)
        return loss

    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        losses.append(float(step(batch()).reduce_mean()))
        optimizer.step()
    assert losses[-1] < losses[0]
    return losses[0]


@pytest.mark.parametrize("key", ["bf16", "fp16"])
@pytest.mark.parametrize("layout", ["one process", "pipeline"])
def test_training_in_16_bits(pool: Pool, layout: str, key: str) -> None:
    size, config = LAYOUTS[layout]
    want = plain_loss(llama(), batch()).item()
    for loss in pool.run(size, narrow, {**config, key: True}):
        assert loss == pytest.approx(want, rel=2e-2)


# ---- refusals


def capped() -> nn.Module:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8))


def other_loss() -> nn.Module:
    model: Any = llama()
    model.loss_function = lambda logits, labels, **_: logits.square().mean()
    return model  # type: ignore[no-any-return]


def other_head() -> nn.Module:
    model: Any = llama()
    model.lm_head = nn.Sequential(nn.Linear(16, VOCABULARY))
    return model  # type: ignore[no-any-return]


def hooked() -> nn.Module:
    model: Any = llama().float()
    model.lm_head.register_forward_hook(lambda module, args, output: output * 2)
    return model  # type: ignore[no-any-return]


def classifier() -> nn.Module:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    return LlamaForSequenceClassification(LlamaConfig(**SIZES))


def own_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCABULARY, 4), nn.Linear(4, VOCABULARY))


def wrap(rank: int, make: Callable[[], nn.Module], runs: bool) -> None:
    import smp

    smp.init(KEY)
    model = smp.DistributedModel(make())
    if runs:
        model(**batch())


@pytest.mark.parametrize(
    ("make", "runs", "text"),
    [
        (other_loss, False, "another loss function than ForCausalLMLoss"),
        (other_head, False, "has a Sequential as its head"),
        (classifier, False, "none was found"),
        (own_model, False, "smp.nn.functional.linear_cross_entropy"),
        (capped, True, "a scale or a cap of logits"),
        (hooked, True, "has hooks"),
    ],
)
def test_models_whose_loss_needs_logits_are_refused(
    pool: Pool, make: Callable[[], nn.Module], runs: bool, text: str
) -> None:
    with pytest.raises(RankFailure, match=text):
        pool.run(1, wrap, make, runs)


def unchanged(rank: int) -> str:
    import smp

    smp.init({})
    model = smp.DistributedModel(llama())
    assert model(**batch()).logits.shape == (SAMPLES, LENGTH, VOCABULARY)
    return type(model.get_module().lm_head).__name__


def test_without_the_key_nothing_changes(pool: Pool) -> None:
    assert pool.run(1, unchanged) == ["Linear"]
