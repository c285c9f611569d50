"""Models with ``fp8`` in every layout, against a plain script whose layers have 8-bit operands.

All is float64 but the operands, so that the numbers of a layout are those of one process unless a
scale differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.dist.pool import Pool
from tests.dist.test_fused_heads import LAYOUTS
from tests.losses.running import plain_names
from tests.reference.fp8 import use_fp8
from tests.reference.tolerances import MIXED_TOLERANCE, TOLERANCE

Config = dict[str, Any]
MICROBATCHES, SAMPLES, LENGTH, VOCABULARY = 2, 8, 12, 31
SCALINGS = ("rowwise", "tensorwise")
SPLIT = [name for name, (_, config) in LAYOUTS.items() if "tensor_parallel_degree" in config]
SIZES: dict[str, Any] = {
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64,
    "intermediate_size": 96, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH,
    "use_cache": False,
}  # fmt: skip


def llama() -> nn.Module:
    """Returns a model of plain linear layers, which tensor parallelism splits by a plan."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(4)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).double()


def gpt2() -> nn.Module:
    """Returns a model that tensor parallelism replaces by layers of `smp.nn`."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(6)
    sizes = {"n_layer": 3, "n_head": 4, "n_embd": 64, "n_positions": LENGTH, "use_cache": False}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(**sizes, **rates, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).double()


MODELS = {"llama": llama, "gpt2": gpt2}


def plain(kind: str, scaling: str) -> nn.Module:
    """Returns the model of the plain script, in which all layers but the head have 8 bits."""
    model = MODELS[kind]()
    for module in list(model.modules()):
        for key, child in list(module.named_children()):
            if type(child).__name__ == "Conv1D":
                linear = nn.Linear(child.nx, child.nf, dtype=torch.float64)
                linear.weight.data, linear.bias.data = child.weight.data.t(), child.bias.data
                setattr(module, key, linear)
    for name, module in model.named_modules():
        if type(module) is nn.Linear and name != "lm_head":
            use_fp8(module, scaling, num=3 if name.endswith("c_attn") else 1)
    return model


def batch() -> Tensor:
    generator = torch.Generator().manual_seed(100)
    return torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=generator)


def loss_of(model: Any, ids: Tensor) -> Tensor:
    logits = model(ids, attention_mask=torch.ones_like(ids)).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def train(rank: int, kind: str, config: Config) -> tuple[float, dict[str, Tensor], list[str]]:
    """Makes an update by SGD; returns the loss, the state, and classes of converted layers."""
    import smp
    from smp.tensor_parallel.products import fp8_of

    smp.init({"ddp": True, "microbatches": MICROBATCHES, "fp8_skip": "head", **config})
    model = MODELS[kind]()
    if "bf16" in config or "fp16" in config:
        model = model.float()  # masters are float32
    if smp.tp_size() > 1:
        smp.set_tensor_parallelism(model, True)
    wrapped = smp.DistributedModel(model)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(wrapped.parameters(), lr=1.0))

    @smp.step
    def step(ids: Tensor) -> Tensor:
        loss = loss_of(wrapped, ids)
        wrapped.backward(loss)
        return loss

    is_common = config.get("prescaled_batch", False)
    number, count = (
        (smp.rdp_rank(), smp.rdp_size()) if is_common else (smp.dp_rank(), smp.dp_size())
    )
    mean = step(batch().chunk(count)[number]).reduce_mean().detach()
    optimizer.step()
    losses = smp.allgather(float(mean), smp.WORLD)
    state = plain_names(wrapped.state_dict(), MODELS[kind]())
    layers = [type(m).__name__ for m in wrapped.get_module().modules() if fp8_of(m) is not None]
    return sum(losses) / len(losses), state, layers


def pieces(size: int, config: Mapping[str, Any]) -> list[Tensor]:
    """Returns the samples that a layout multiplies together: tensorwise they share scales."""
    tp, pp = config.get("tensor_parallel_degree", 1), config.get("pipeline_parallel_degree", 1)
    own = 1 if config.get("prescaled_batch", False) else tp
    groups = batch().chunk(size // (tp * pp))
    return [
        torch.cat([rank.chunk(MICROBATCHES)[number] for rank in group.chunk(own)])
        for group in groups
        for number in range(MICROBATCHES)
    ]


def reference(kind: str, scaling: str, batches: list[Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Returns loss and state after one update of the plain script."""
    model = plain(kind, scaling)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses = [loss_of(model, ids) for ids in batches]
    mean = sum(losses, start=torch.tensor(0.0)) / len(losses)
    mean.backward()
    optimizer.step()
    transposed = {"c_attn", "c_proj", "c_fc"}  # a Conv1D has them so
    state = {
        name: value.t() if name.endswith("weight") and name.split(".")[-2] in transposed else value
        for name, value in model.state_dict().items()
    }
    return mean.item(), state


def change(kind: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    begin = MODELS[kind]().state_dict()
    return {name: value - begin[name] for name, value in state.items()}


def distance(found: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> float:
    largest = max(float(v.abs().max()) for v in want.values())
    return max(float((found[n] - v).abs().max()) for n, v in want.items()) / largest


def check(
    kind: str, scaling: str, layout: str, pool: Pool, classes: set[str], limit: float
) -> None:
    size, config = LAYOUTS[layout]
    # Rowwise nothing depends on how the batch is cut.
    batches = [batch()] if scaling == "rowwise" else pieces(size, config)
    loss, state = reference(kind, scaling, batches)
    want = change(kind, state)
    results = pool.run(size, train, kind, {"fp8": scaling, **config})
    assert len(results) == size
    for found, found_state, layers in results:
        assert classes <= set(layers)
        assert found == pytest.approx(loss, rel=limit)
        assert distance(change(kind, found_state), want) < limit


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_plain_and_planned_layers_equal_the_plain_script(
    pool: Pool, layout: str, scaling: str
) -> None:
    classes = {"PlannedColumn", "PlannedRow"} if layout in SPLIT else {"Fp8Linear"}
    check("llama", scaling, layout, pool, classes, TOLERANCE[torch.float64])


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("layout", SPLIT)
def test_layers_of_smp_nn_equal_the_plain_script(pool: Pool, layout: str, scaling: str) -> None:
    classes = {"ColumnLinear", "RowLinear"}
    check("gpt2", scaling, layout, pool, classes, TOLERANCE[torch.float64])


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("layout", ["own batches", "pipeline", "replicas", "sharded"])
def test_training_in_16_bits_is_near(pool: Pool, layout: str, dtype: str) -> None:
    size, config = LAYOUTS[layout]
    loss, state = reference("llama", "rowwise", [batch()])
    want = change("llama", state)
    for found, found_state, layers in pool.run(
        size, train, "llama", {"fp8": "rowwise", dtype: True, **config}
    ):
        assert layers
        assert found == pytest.approx(loss, rel=MIXED_TOLERANCE[torch.bfloat16].losses)
        found_change = change("llama", found_state)
        difference = sum(float((found_change[n] - v).square().sum()) for n, v in want.items())
        length = sum(float(v.square().sum()) for v in want.values())
        # Wherever 16 bits round to another number of 8 bits, the step is as large as in bf16.
        assert (difference / length) ** 0.5 < 2 * MIXED_TOLERANCE[torch.bfloat16].changes
