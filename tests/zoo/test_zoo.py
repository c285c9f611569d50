"""The zoo's own rules, and a sample of its models on two ranks.

``make test-all`` runs all of them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import nn

from tests.dist.pool import Outcome, Pool
from tests.zoo import catalogue
from tests.zoo.__main__ import choose, run_entry
from tests.zoo.building import build, make_plan
from tests.zoo.catalogue import Entry, families
from tests.zoo.configs import VARIANTS, tiny
from tests.zoo.judging import (
    DIFFERENT,
    EQUAL,
    NAN,
    REFUSED,
    SKIPPED,
    Result,
    is_ours,
    is_rounding,
    judge,
    skip_if_chaotic,
)
from tests.zoo.known import reason_for
from tests.zoo.modes import MODES
from tests.zoo.rules import LAYERS, VOCABULARY
from tests.zoo.running import Job, Record, make_batches, train_alone
from tests.zoo.shrinking import (
    keep_few_of_equal_layers,
    narrow_classifiers,
    size_of,
    without_randomness,
)

transformers = pytest.importorskip("transformers", minversion="5.0")

SAMPLE = (
    "NanoGPT", "MovingAverageBuffer", "ChildsParameterAsArgument", "WeightNorm", "Dataclasses",
    "DictChangedInPlace", "RoutedByData", "ForwardHooksChangeOutputs",
    "transformers/gpt2", "transformers/t5", "transformers/vit", "transformers/mixtral",
    "transformers/wav2vec2",
)  # fmt: skip


# ---- configurations by rule ------------------------------------------------


def test_widths_heads_layers_and_words_become_small() -> None:
    small = tiny(transformers.LlamaConfig(num_key_value_heads=8))
    assert small.hidden_size == 32 and small.num_attention_heads == 4
    assert small.num_hidden_layers == LAYERS and small.vocab_size == VOCABULARY
    assert small.num_key_value_heads == 2, "there were fewer heads of keys"
    assert type(small) is transformers.LlamaConfig


def test_heads_of_keys_stay_as_many_as_heads_of_queries() -> None:
    small = tiny(transformers.LlamaConfig(num_key_value_heads=32))
    assert small.num_key_value_heads == small.num_attention_heads == 4


def test_probabilities_of_dropout_are_zero_and_other_numbers_stay() -> None:
    small = tiny(transformers.BertConfig(hidden_dropout_prob=0.3, layer_norm_eps=1e-7))
    assert small.hidden_dropout_prob == small.attention_probs_dropout_prob == 0.0
    assert small.layer_norm_eps == 1e-7


def test_special_tokens_are_words_and_stay_different() -> None:
    small = tiny(transformers.Qwen2VLConfig())
    ids = [small.image_token_id, small.video_token_id, small.vision_start_token_id]
    assert len(set(ids)) == 3 and all(0 <= i < small.text_config.vocab_size for i in ids)


def test_nested_configurations_become_small_too() -> None:
    small = tiny(transformers.CLIPConfig())
    assert small.text_config.hidden_size == small.vision_config.hidden_size == 32
    assert small.vision_config.image_size // small.vision_config.patch_size == 4


def test_kinds_of_layers_are_kept() -> None:
    config = transformers.Qwen3NextConfig()
    small = tiny(config)
    assert set(small.layer_types) == set(config.layer_types)
    assert len(small.layer_types) == small.num_hidden_layers <= 4


def test_lists_of_stages_keep_their_length() -> None:
    config = transformers.SegformerConfig()
    small = tiny(config)
    assert len(small.hidden_sizes) == len(small.depths) == len(config.depths)
    assert max(small.depths) <= LAYERS and max(small.hidden_sizes) <= 32


def test_scaled_widths_keep_their_proportions() -> None:
    config = transformers.Mamba2Config()
    small = tiny(config, next(v for v in VARIANTS if v.scaled))
    assert small.hidden_size * small.expand == small.num_heads * small.head_dim
    assert small.hidden_size < config.hidden_size


def test_products_that_were_equal_are_equal() -> None:
    small = tiny(transformers.BambaConfig())
    assert small.mamba_n_heads * small.mamba_d_head == small.mamba_expand * small.hidden_size
    assert small.hidden_size == 32


def test_hybrid_models_keep_a_layer_with_keys() -> None:
    assert "full_attention" in tiny(transformers.GraniteMoeHybridConfig()).layer_types


def test_backbone_gives_as_many_stages_as_before() -> None:
    config = transformers.RTDetrConfig()
    small = tiny(config)
    assert small.backbone_config.out_indices == config.backbone_config.out_indices
    assert len(small.backbone_config.out_indices) == len(small.encoder_in_channels) == 3


def test_backbone_of_a_package_becomes_one_of_transformers() -> None:
    config = transformers.DetrConfig()
    small = tiny(config).backbone_config
    assert config.backbone_config.model_type == "timm_backbone"
    assert small.model_type == "resnet" and small.out_indices == [1, 2, 3, 4]


def test_open_fields_are_filled_only_where_asked() -> None:
    config = transformers.HunYuanDenseV1Config()
    assert config.head_dim is None and tiny(config).head_dim is None
    assert tiny(config, next(v for v in VARIANTS if v.filled)).head_dim == 8


def test_chances_in_lists_are_zero() -> None:
    assert set(tiny(transformers.CvtConfig()).drop_path_rate) == {0.0}


def test_indices_of_layers_name_layers_that_are_there() -> None:
    small = tiny(transformers.SegGptConfig())
    assert len(small.intermediate_hidden_state_indices) == 4
    assert max(small.intermediate_hidden_state_indices) < small.num_hidden_layers


@pytest.mark.parametrize(
    ("name", "argument"),
    [("lxmert", "visual_feats"), ("splinter", "question_positions"), ("idefics/", "pixel_values")],
)
def test_arguments_are_made_by_their_names(name: str, argument: str) -> None:
    from tests.zoo.building import build, make_plan

    plan = make_plan(choose(name, False)[0])
    assert plan.recipe.own_loss
    assert argument in plan.recipe.inputs(build(plan), plan.dtype, plan.seed)


@pytest.mark.parametrize("variant", VARIANTS[:2], ids=["derived", "plain"])
def test_a_model_of_a_tiny_configuration_is_tiny(variant: Any) -> None:
    config = tiny(transformers.GPT2Config(), variant)
    model = transformers.GPT2LMHeadModel(config)
    assert sum(p.numel() for p in model.parameters()) < 50_000


def test_models_come_from_the_installed_release() -> None:
    found = families()
    assert len(found) > 100
    assert found["gpt2"][0].name == "GPT2LMHeadModel"
    assert found["gpt2"][0].load() is transformers.GPT2LMHeadModel


# ---- models without a configuration ----------------------------------------


def test_few_of_equal_layers_stay_and_others_all() -> None:
    blocks = nn.Sequential(nn.Linear(4, 8), *(nn.Linear(8, 8) for _ in range(5)), nn.Linear(8, 4))
    lists = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
    keep_few_of_equal_layers(nn.ModuleDict({"blocks": blocks, "lists": lists}))
    assert [tuple(layer.weight.shape) for layer in blocks] == [(8, 4), (8, 8), (8, 8), (4, 8)]
    assert len(lists) == LAYERS and lists[LAYERS - 1] is not lists[0]


def test_activations_between_equal_layers_stay() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.ReLU(), nn.ReLU(), nn.Linear(4, 4))
    keep_few_of_equal_layers(model)
    assert len(model) == 5, "layers without parameters cost nothing"


def test_probabilities_of_modules_become_zero() -> None:
    model = nn.Sequential(nn.Dropout(0.3), nn.Linear(2, 2))
    model.drop_rate, model.dropout_prob, model.eps = 0.1, 0.2, 1e-5  # type: ignore[assignment]
    without_randomness(model)
    assert model[0].p == model.drop_rate == model.dropout_prob == 0.0 and model.eps == 1e-5


def test_wide_classifiers_become_narrow() -> None:
    model = nn.Sequential(nn.Linear(8, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.Linear(4096, 2))
    narrow_classifiers(model)
    assert model(torch.ones(1, 8)).shape == (1, 2)
    assert size_of(model) < 10_000


def test_packages_that_are_not_installed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(catalogue.OPTIONAL, "no_such_package", "tests.zoo.vision:timm_entries")
    assert "no_such_package" in catalogue.missing_sources()
    assert "no_such_package" not in catalogue.installed_sources()


@pytest.mark.parametrize(
    ("package", "name", "largest"),
    [
        ("torchvision", "torchvision/shufflenetv2", 400_000),
        ("timm", "timm/vision_transformer/", 400_000),
        ("diffusers", "diffusers/transformers.transformer_flux/", 200_000),
    ],
)
def test_sample_of_another_package(pool: Pool, package: str, name: str, largest: int) -> None:
    pytest.importorskip(package)
    [entry] = choose(name, False)
    assert entry.source == package
    assert size_of(build(make_plan(entry))) < largest
    [result] = run_entry(pool, entry, [MODES["pp2"]])
    assert result.outcome == EQUAL, f"{result.reason}\n{result.details}"
    assert result.remote_calls > 0, "one rank computed everything"


# ---- judging ---------------------------------------------------------------


def _job_and_record() -> tuple[Job, list[Record]]:
    plan = make_plan(choose("patterns/*/SharedLayer", False)[0])
    job = Job(plan, MODES["pp2"], make_batches(plan, 1))
    return job, train_alone(job)


def _judged(change: Any) -> Result:
    job, alone = _job_and_record()
    record = dataclasses.replace(
        alone[0],
        losses=[list(losses) for losses in alone[0].losses],
        grads=[dict(grads) for grads in alone[0].grads],
        params=dict(alone[0].params),
    )
    change(record)
    return judge(Result("a/b/c", "b", "pp2", EQUAL), [record], alone, job)


def test_the_same_numbers_are_equal_bit_by_bit() -> None:
    result = _judged(lambda record: None)
    assert result.outcome == EQUAL and result.bitwise


def _change_loss(record: Record) -> None:
    record.losses[1][0] += 1e-3


def _lose_gradient(record: Record) -> None:
    record.grads[0][next(iter(record.grads[0]))] = None


def _change_parameter(record: Record) -> None:
    name = next(iter(record.params))
    record.params[name] = record.params[name] * 1.01  # type: ignore[operator]


def _lose_parameter(record: Record) -> None:
    del record.params[next(iter(record.params))]


@pytest.mark.parametrize(
    "change", [_change_loss, _lose_gradient, _change_parameter, _lose_parameter]
)
def test_a_difference_is_named(change: Any) -> None:
    result = _judged(change)
    assert result.outcome == DIFFERENT and result.reason


class Chaotic(nn.Module):
    """The logistic map, many times: rounding grows until it is all there is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Any, **others: Any) -> Any:
        value = torch.sigmoid(x * self.weight)
        for _ in range(100):
            value = 3.99 * value * (1 - value)
        return value.mean()


@pytest.mark.parametrize("outcome", [DIFFERENT, SKIPPED])
def test_a_model_that_amplifies_rounding_proves_nothing(outcome: str) -> None:
    stable = choose("patterns/*/SharedLayer", False)[0]
    entry = stable if outcome == DIFFERENT else Entry("patterns", "patterns", __name__, "Chaotic")
    plan = make_plan(entry)
    job = Job(plan, MODES["pp2"], make_batches(plan, 1))
    details = "loss of step 1 on pp_rank 0 differs by 1.0e-01: [1.0] for [1.1]"
    result = Result("a/b/c", "b", "pp2", DIFFERENT, details=details)
    skip_if_chaotic(result, train_alone(job), job)
    assert result.outcome == outcome


def test_a_lost_gradient_is_no_rounding() -> None:
    plan = make_plan(Entry("patterns", "patterns", __name__, "Chaotic"))
    job = Job(plan, MODES["pp2"], make_batches(plan, 1))
    details = "gradient of step 1 weight: none instead of a value"
    result = Result("a/b/c", "b", "pp2", DIFFERENT, details=details)
    skip_if_chaotic(result, train_alone(job), job)
    assert result.outcome == DIFFERENT


class OneProcess:
    """Gives what one process does as what ranks have done, changed a little."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def outcomes(self, world_size: int, function: Any, job: Job, **_: Any) -> list[Outcome]:
        assert job.lifted
        [record] = train_alone(job)
        name = next(iter(record.params))
        record.params[name] = record.params[name] * self._factor  # type: ignore[operator]
        return [Outcome(0, value=record)]


@pytest.mark.parametrize(
    ("factor", "difference", "rounds"),
    [(1.0, 5.3e-6, True), (1 + 1e-7, 5.3e-6, False), (1.0, 1e-3, False)],
)
def test_what_is_gone_without_casts_and_as_small_as_theirs_is_rounding(
    factor: float, difference: float, rounds: bool
) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    job, alone = _gemma4()
    found = {"parameter model.embed_tokens.weight": difference}
    result = Result(str(job.plan.entry), "gemma4", "pp2", DIFFERENT, found=found)
    pool: Any = OneProcess(factor)
    assert is_rounding(pool, result, alone, job) is rounds


@functools.cache
def _gemma4() -> tuple[Job, list[Record]]:
    [entry] = choose("transformers/gemma4/*", False)
    plan = make_plan(entry)
    job = Job(plan, MODES["pp2"], make_batches(plan, 1))
    return job, train_alone(job)


def test_nan_is_an_outcome_of_its_own() -> None:
    def change(record: Record) -> None:
        name = next(iter(record.params))
        record.params[name] = record.params[name] * float("nan")  # type: ignore[operator]

    assert _judged(change).outcome == NAN


def test_an_error_of_ours_is_one_that_we_raise() -> None:
    frame = '  File "{}", line 3, in call\n    {}\n'
    ours = frame.format("/x/python/smp/step.py", 'raise ValueError("no")')
    theirs = frame.format("/x/python/smp/step.py", "value = function(x)")
    assert is_ours(Outcome(0, error="ValueError", message="no", traceback=ours))
    assert not is_ours(Outcome(0, error="TypeError", message="no", traceback=theirs))
    assert not is_ours(Outcome(0, error="TypeError", message="no", traceback=""))
    prefixed = "[global_rank 1 | pp 1 tp 0 rdp 0] no"
    assert is_ours(Outcome(0, error="RuntimeError", message=prefixed, traceback=theirs))


# ---- a sample of the models ------------------------------------------------


@pytest.mark.sample(keep=5)
@pytest.mark.parametrize("name", SAMPLE)
def test_sample_has_the_numbers_of_one_process_or_is_refused(pool: Pool, name: str) -> None:
    [result] = run_entry(pool, choose(name, False)[0], [MODES["pp2"]])
    known = reason_for(result)
    if known is None:
        assert result.outcome in (EQUAL, REFUSED), f"{result.reason}\n{result.details}"
    else:
        assert result.outcome != EQUAL, f"{name} is equal: take it out of tests/zoo/known.py"
    if result.outcome == EQUAL:
        assert result.remote_calls > 0, "one rank computed everything"
