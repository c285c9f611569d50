"""The training that tests of quantized models share: adapters of PEFT on a frozen base."""

from __future__ import annotations

import functools
import io
import logging
import warnings
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from smp.modules import packed

KINDS = ("nf4", "int8", "ao-int8", "ao-int4")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pipeline": (2, {"pipeline_parallel_degree": 2, "microbatches": 2}),
    "replicas": (2, {"microbatches": 1}),
    "sharded state": (2, {"shard_optimizer_state": True, "microbatches": 1}),
    "sharded": (2, {"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0.0}),
    "split": (2, {"tensor_parallel_degree": 2}),
    "pipeline of replicas": (4, {"pipeline_parallel_degree": 2, "microbatches": 2}),
}
TARGETS = ["q_proj", "v_proj", "down_proj"]
NUM_STEPS = 3


@dataclass(frozen=True)
class Job:
    """A training of adapters.

    Attributes:
        folder: folder of the base model's files.
        kind: quantization, one of `KINDS`.
        config: keys of smp; None: plain PyTorch in one process.
        is_late: whether ranks read and quantize their own layers, by `smp.quantize`.
        begin: values of the adapters at the beginning, by name; None: those of their creation.
        saves, resumes: folder of a checkpoint, written after the first step or read before it.
        exports: folder for the adapters after the last step, in PEFT's form.
        dtype: dtype of the model before it is quantized.
        evaluates: whether the model is evaluated after each step.
        is_prepared: whether PEFT prepares the model: layers in FP32 and activation checkpointing.
    """

    folder: str
    kind: str
    use_dora: bool = False
    config: dict[str, Any] | None = None
    is_late: bool = False
    begin: dict[str, Tensor] | None = None
    saves: str | None = None
    resumes: str | None = None
    exports: str | None = None
    dtype: torch.dtype = torch.float32
    evaluates: bool = False
    is_prepared: bool = False


def config_of(kind: str) -> Any:
    """Returns the quantization as scripts give it to transformers."""
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if kind == "nf4":
        return BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        )  # fmt: skip
    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup

    if kind == "ao-int8":
        return TorchAoConfig(Int8WeightOnlyConfig())
    return TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)))


def sizes() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=60, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=4, initializer_range=0.2,
    )  # fmt: skip


def write_base(folder: str) -> None:
    """Writes a small model in full precision."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(5)
    LlamaForCausalLM(sizes()).save_pretrained(folder)


def with_adapters(model: Any, use_dora: bool) -> Any:
    """Adds adapters that have an effect from the beginning."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(6)
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=TARGETS, task_type="CAUSAL_LM", use_dora=use_dora,
        init_lora_weights=False,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torchao's merge
        return get_peft_model(model, config)


def loaded(
    folder: str,
    kind: str,
    use_dora: bool,
    dtype: torch.dtype = torch.float32,
    is_prepared: bool = False,
) -> Any:
    """Returns a model that transformers has quantized, as in a plain script."""
    from peft import prepare_model_for_kbit_training
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(
        folder, quantization_config=config_of(kind), device_map="cpu", dtype=dtype
    )
    if is_prepared:
        options = {"use_reentrant": False}
        model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs=options)
        assert model.is_gradient_checkpointing
    return with_adapters(model, use_dora).train()


def unpacked(folder: str) -> Any:
    """Returns the model whose layers have the 8-bit values in full precision, with adapters.

    On the CPU, PEFT's DoRA loses the scales of 8-bit layers of bitsandbytes in the second forward.
    """
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(
        folder, quantization_config=config_of("int8"), device_map="cpu", dtype=torch.float32
    )
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "Linear8bitLt":
            weight = module.weight
            plain = torch.nn.Linear(module.in_features, module.out_features, bias=False)
            plain.weight.data = weight.data * weight.SCB.unsqueeze(1).mul(1.0 / 127.0)
            model.set_submodule(name, plain)
    model.is_loaded_in_8bit = False
    return with_adapters(model, True).train()


def late(folder: str, kind: str, use_dora: bool, is_inside: bool = False) -> Any:
    """Returns a model without values, whose layers are read and quantized where they belong.

    Args:
        folder: files of the model.
        kind: quantization.
        use_dora: whether adapters are those of DoRA.
        is_inside: whether the caller delays initialization.
    """
    from transformers import LlamaForCausalLM

    import smp

    with nullcontext() if is_inside else smp.delay_param_initialization():
        model = smp.quantize(LlamaForCausalLM(sizes()), config_of(kind), weights=folder)
        model = with_adapters(model, use_dora)
    assert all(p.is_meta for p in model.parameters())
    return model.train()


def values_at_creation(rank: int, job: Job) -> dict[str, Tensor]:
    """Returns the first values of a late model's adapters, which no layout changes."""
    import smp

    smp.init({"ddp": True})
    torch.manual_seed(8)
    state = smp.DistributedModel(late(job.folder, job.kind, job.use_dora)).state_dict()
    return {name: value.clone() for name, value in state.items() if "lora_" in name}


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(4, 60, (4, 12), generator=generator)


def train(rank: int, job: Job) -> dict[str, Any]:
    """Trains adapters for some steps; returns losses, gradients of the first step, and values."""
    import smp

    if job.config is not None:
        smp.init({"ddp": True, "microbatches": 1, **job.config})
    if job.config is None and job.kind == "int8" and job.use_dora:
        plain = unpacked(job.folder)
    elif job.is_late:
        torch.manual_seed(8)  # of the adapters
        plain = late(job.folder, job.kind, job.use_dora)
    else:
        plain = loaded(job.folder, job.kind, job.use_dora, job.dtype, job.is_prepared)
    if job.begin is not None:
        found = plain.load_state_dict(job.begin, strict=False)
        assert job.begin and not found.unexpected_keys
    return run(plain, job)


def run(plain: Any, job: Job) -> dict[str, Any]:
    import smp
    from smp.nn import DistributedModule

    config, model = job.config, plain
    log = io.StringIO()
    if config is not None:
        if config.get("tensor_parallel_degree", 1) > 1:
            smp.set_tensor_parallelism(plain)
        handler = logging.StreamHandler(log)
        logging.getLogger("smp").addHandler(handler)
        model = smp.DistributedModel(model)
        logging.getLogger("smp").removeHandler(handler)
    if config is not None and not config.get("auto_partition", True):
        for layer in plain.get_base_model().model.layers[2:]:
            smp.set_partition(layer, 1)
    optimizer: Any = adamw(p for p in model.parameters() if p.requires_grad)
    if config is not None:
        optimizer = smp.DistributedOptimizer(optimizer)
    found = train_steps(plain, model, optimizer, job)
    split = [n for n, m in plain.named_modules() if isinstance(m, DistributedModule)]
    return {**found, "split": sorted(split), "log": log.getvalue()}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def train_by_auto(rank: int, job: Job, file: str, is_module: bool) -> dict[str, Any]:
    """Trains a model that `smp.auto` lays out: made by a function, or loaded before.

    Returns:
        what `train` returns, bytes of parameters, and what the first rank has said.
    """
    import smp

    model: Any = functools.partial(late, job.folder, job.kind, job.use_dora, is_inside=True)
    if is_module:
        model = loaded(job.folder, job.kind, job.use_dora)
    length, config = batch(0).shape[1], job.config
    torch.manual_seed(8)  # of the adapters
    with redirect_stdout(io.StringIO()) as said:
        made, optimizer = smp.auto(model, adamw, batch=4, seq=length, config=config, file=file)
    found = train_steps(made.get_module(), made, optimizer, replace(job, config=smp.state.cfg))
    num_bytes = sum(packed.num_bytes(p) for p in made.local_parameters())
    return {**found, "bytes": num_bytes, "said": said.getvalue()}


def train_steps(plain: Any, model: Any, optimizer: Any, job: Job) -> dict[str, Any]:
    """Trains a model that is wrapped, or plain; returns losses, gradients and values."""
    import smp

    @smp.step
    def train_step(model: Any, ids: Tensor) -> Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        model.backward(loss)
        return loss

    @smp.step
    def evaluate(model: Any, ids: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        return loss

    losses: list[float] = []
    evaluated: list[float] = []
    grads: dict[str, Tensor] = {}
    if job.resumes is not None:
        smp.resume_from_checkpoint(job.resumes, tag="first")
    for step in range(0 if job.resumes is None else 1, NUM_STEPS):
        ids = batch(step)
        optimizer.zero_grad()
        if job.config is not None:
            size, number = smp.dp_size(), smp.dp_rank()
            mean = train_step(model, ids.chunk(size)[number]).reduce_mean().detach()
            # Tensor-parallel ranks have samples of their own, ranks of a pipeline the same.
            loss = sum(smp.allgather(float(mean), smp.WORLD)) / smp.size()
        else:
            mean = model(input_ids=ids, labels=ids).loss
            mean.backward()
            loss = float(mean.detach())
        if step == 0:
            grads = {n: p.grad.clone() for n, p in plain.named_parameters() if p.grad is not None}
        optimizer.step()
        losses.append(loss)
        if job.evaluates:
            model.eval()
            with torch.no_grad():
                evaluated.append(float(evaluate(model, ids).reduce_mean()))
            model.train()
        if job.saves is not None and step == 0:
            smp.save_checkpoint(job.saves, "first", model=model, optimizer=optimizer)
    if job.exports is not None:
        smp.save_adapters(model, job.exports)
    state = model.state_dict()
    values = {n: v.clone() for n, v in state.items() if "lora_" in n}
    return {
        "losses": losses,
        "evaluated": evaluated,
        "grads": grads,
        "values": values,
        "keys": list(state),
    }
