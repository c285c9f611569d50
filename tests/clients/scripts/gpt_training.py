"""Common parts of the GPT scripts of clients A, C and D, from their description alone."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging import version
from torch import Tensor, nn

import smdistributed.modelparallel
import smdistributed.modelparallel.torch as smp
from tests.clients.scripts.data_pipeline import make_loader
from tests.clients.scripts.helpers import (
    AnnealingLR,
    memory_status,
    num_params_of,
    param_groups_of,
    report,
    set_seed,
)

LENGTH, VOCABULARY = 16, 64
_SUBLAYERS = ("attention", "output", "attn", "mlp", "self_attention", "input_layernorm",
              "post_attention_layernorm")  # fmt: skip


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Arguments of all three; each client has its defaults in what the test passes."""
    parser = argparse.ArgumentParser()
    numbers = {
        "tensor_parallel_degree": 1, "pipeline_parallel_degree": 1, "microbatches": 1,
        "active_microbatches": 0, "shard_optimizer_state": 0, "prescaled_batch": 1, "fp16": 0,
        "bf16": 0, "offload_activations": 0, "delayed_param": 0, "skip_tracing": 0,
        "manual_partition": 0, "activation_checkpointing": 1, "activation_loading_horizon": 4,
        "sharded_data_parallel_degree": 1, "use_distributed_transformer": 1, "batch_size": 2,
        "gradient_accumulation": 1, "max_steps": 4, "save_step": 2, "seed": 12345,
        "logits_output": 0, "load_partial": 0, "load_full": 0, "finetune": 0, "heads": 2,
        "hidden": 32, "layers": 2, "checkpoint_sublayers": 0, "fork_loader": 0,
    }  # fmt: skip
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--model_type", default="gpt2")
    parser.add_argument("--optimize", default="speed")
    parser.add_argument("--placement_strategy", default="cluster")
    parser.add_argument("--activation_strategy", default="each")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--grad_clip", type=float, default=1.0)
    # Must be there, as in a training job.
    parser.add_argument("--num_gpus", default=os.environ["SM_NUM_GPUS"])
    parser.add_argument("--checkpoint_dir", default=os.environ["SM_OUTPUT_DATA_DIR"])
    parser.add_argument("--model_dir", default=os.environ["SM_MODEL_DIR"])
    parser.add_argument("--training_dir", default=os.environ["SM_CHANNEL_TRAIN"])
    parser.add_argument("--test_dir", default=os.environ["SM_CHANNEL_TEST"])
    return parser.parse_args(argv)


def init(args: argparse.Namespace, **more: Any) -> None:
    config: dict[str, Any] = {
        "ddp": True,
        "tensor_parallel_degree": args.tensor_parallel_degree,
        "pipeline_parallel_degree": args.pipeline_parallel_degree,
        "microbatches": args.microbatches,
        "shard_optimizer_state": args.shard_optimizer_state > 0,
        "prescaled_batch": args.prescaled_batch > 0,
        "fp16": args.fp16 > 0,
        "bf16": args.bf16 > 0,
        "offload_activations": args.offload_activations > 0,
        "delayed_parameter_initialization": args.delayed_param > 0,
        "optimize": args.optimize,
        "placement_strategy": args.placement_strategy,
        "activation_loading_horizon": args.activation_loading_horizon,
        "skip_tracing": args.skip_tracing > 0,
        "auto_partition": not args.manual_partition,
        "default_partition": 0,
        "static_mode": 0,
        "fast_mode": 0,
        "sharded_data_parallel_degree": args.sharded_data_parallel_degree,
        **more,
    }
    if args.active_microbatches:
        config["active_microbatches"] = args.active_microbatches
    smp.init(config)
    assert version.parse(smdistributed.modelparallel.__version__) >= version.parse("1.10")
    assert smp.state.cfg.fp16 == (args.fp16 > 0)
    assert smp.state.cfg.prescaled_batch == (args.prescaled_batch > 0)


def dtype_of(args: argparse.Namespace) -> torch.dtype:
    if args.fp16:
        return torch.float16
    return torch.bfloat16 if args.bf16 else torch.get_default_dtype()


def create(args: argparse.Namespace, build: Callable[[], nn.Module], **options: Any) -> nn.Module:
    """Builds inside of the context, with HF's own initialisation switched off."""
    transformers.PreTrainedModel.init_weights = lambda self: None
    set_seed(args.seed)
    with smp.model_creation(
        tensor_parallelism=smp.tp_size() > 1 or args.use_distributed_transformer > 0,
        dtype=dtype_of(args),
        attention_in_fp32=False,
        query_key_layer_scaling=args.fp16 > 0,
        fused_softmax=True,
        fused_dropout=True,
        fused_bias_gelu=True,
        **options,
    ):
        return build()


@smp.step
def train_step(
    model: Any, optimizer: Any, input_ids: Tensor, attention_mask: Tensor, args: Any
) -> Any:
    assert isinstance(args, argparse.Namespace)
    output = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)
    loss = output["loss"]
    model.backward(loss)
    return output if args.logits_output else loss


@smp.step
def test_step(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    return model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]


@dataclass
class Job:
    """A run of a script."""

    args: argparse.Namespace
    model: Any
    optimizer: Any = None
    scheduler: Any = None
    hf_config: Any = None
    losses: list[float] = field(default_factory=list)
    means: list[float] = field(default_factory=list)
    num_hook_calls: int = 0
    total_steps: int = 0

    def wrap(self, module: nn.Module) -> None:
        set_seed(self.args.seed + smp.tp_rank())
        self.model = smp.DistributedModel(
            module,
            trace_device="gpu",
            backward_passes_per_step=self.args.gradient_accumulation,
        )
        self.num_params = num_params_of(self.model)
        memory_status("after wrapping")

    def make_optimizer(self, groups: list[dict[str, Any]] | None = None) -> None:
        groups = param_groups_of(self.model) if groups is None else groups
        inner = torch.optim.AdamW(groups, lr=self.args.lr, betas=(0.9, 0.95), eps=1e-3)
        self.optimizer = smp.DistributedOptimizer(
            inner,
            static_loss_scale=None,
            dynamic_loss_scale=True,
            dynamic_loss_args={
                "init_scale": 2.0**12, "scale_window": 1000, "min_scale": 1, "delayed_shift": 2,
            },
        )  # fmt: skip
        assert self.optimizer.overflow is False, "it is asked before the first step"
        self.scheduler = AnnealingLR(self.optimizer, self.args.lr, 2, 8)

        def count(model: Any, optimizer: Any) -> None:
            assert model is self.model and optimizer is self.optimizer
            self.num_hook_calls += 1

        self.model.register_post_partition_hook(count)

    def checkpoint_layers(self, layers: nn.Module) -> None:
        """Activation checkpointing of a sequential, a list of blocks, or sublayers one by one."""
        args = self.args
        if not args.activation_checkpointing:
            return
        if args.checkpoint_sublayers:
            for child in layers.children():
                for name in _SUBLAYERS:
                    if hasattr(child, name):
                        smp.set_activation_checkpointing(getattr(child, name))
        else:  # the list of blocks, too: each of them is a checkpoint then
            smp.set_activation_checkpointing(
                layers, pack_args_as_tuple=True, strategy=args.activation_strategy
            )

    def place_layers(self, layers: nn.Module) -> None:
        if self.args.manual_partition:
            children = list(layers.children())
            for index, child in enumerate(children):
                smp.set_partition(child, index * smp.pp_size() // len(children))

    # ---- checkpoints

    def content(self) -> dict[str, Any]:
        return {
            "cli_args": vars(self.args),
            "num_params": self.num_params,
            "total_steps": self.total_steps,
            "start_train_path_index": 0,
            "model_config": self.hf_config,
            "start_batch_index": self.total_steps,
            "lr_scheduler": self.scheduler.state_dict(),
        }

    def resume(self) -> None:
        """After both objects are wrapped, before the first step."""
        if self.args.load_partial:
            content = smp.resume_from_checkpoint(self.args.checkpoint_dir, tag=None, partial=True)
            self.total_steps = content["total_steps"]
            assert content["start_batch_index"] == self.total_steps
            assert content.get("cli_args")["seed"] == self.args.seed
            assert content["num_params"] == self.num_params
            if self.hf_config is not None:
                assert content["model_config"].vocab_size == self.hf_config.vocab_size
            if "lr_scheduler" in content:
                self.scheduler.load_state_dict(content["lr_scheduler"])
        elif self.args.load_full:
            content = smp.resume_from_checkpoint(
                self.args.model_dir, tag="fullmodel.pt", partial=False
            )
            self.total_steps = content.get("total_steps", 0)
            assert "lr_scheduler" not in content or self.total_steps

    def save_partial(self) -> None:
        smp.save_checkpoint(
            self.args.checkpoint_dir,
            tag=f"total_steps{self.total_steps}",
            partial=True,
            model=self.model,
            optimizer=self.optimizer,
            user_content=self.content(),
            num_kept_partial_checkpoints=5,
        )

    def save_full(self) -> None:
        smp.save_checkpoint(
            self.args.model_dir,
            tag="fullmodel.pt",
            partial=False,
            model=self.model,
            user_content=self.content(),
        )

    # ---- loops

    def train(self) -> None:
        args = self.args
        loader = make_loader(args.batch_size, 8 * args.batch_size, LENGTH, VOCABULARY,
                             args.prescaled_batch > 0)  # fmt: skip
        batches = list(loader)
        self.model.train()
        first = self.total_steps
        for step in range(first * args.gradient_accumulation,
                          args.max_steps * args.gradient_accumulation):  # fmt: skip
            ids, mask = batches[step % 2]
            # Read on all ranks for the throughput.
            assert ids.shape[1] == (LENGTH if smp.pp_rank() == 0 else 0)
            assert ids.device.type == "cpu"
            if step % args.gradient_accumulation == 0 and step > first:
                self.optimizer.zero_grad(set_to_none=True)
            output = train_step(self.model, self.optimizer, ids, mask, args)
            loss_mb = output["loss"] if args.logits_output else output
            if args.logits_output:
                logits = torch.cat(output["logits"].outputs, dim=1 if smp.tp_size() > 1 else 0)
                assert logits.shape[-1] == VOCABULARY
            loss = loss_mb.reduce_mean()
            self.losses.append(loss.item())
            mean = loss.detach().clone()
            torch.distributed.all_reduce(mean, group=smp.get_dp_process_group())
            self.means.append(mean.item() / smp.dp_size())
            if (step + 1) % args.gradient_accumulation:
                continue
            self.update()
            if self.total_steps == args.save_step and not args.load_partial:
                self.save_partial()

    def update(self) -> None:
        args = self.args
        if args.fp16 and args.sharded_data_parallel_degree <= 1:
            norm = self.optimizer.clip_master_grads(args.grad_clip)
            assert norm > 0 or self.optimizer.overflow
        self.optimizer.step()
        if not (args.fp16 and self.optimizer.overflow):
            self.scheduler.step()
        self.total_steps += 1

    def evaluate(self) -> float:
        """Mean loss over the replicas, on every rank."""
        self.model.eval()
        total = torch.zeros(1)
        with torch.no_grad():
            for ids, mask in make_loader(self.args.batch_size, 4, LENGTH, VOCABULARY, True):
                total = total + test_step(self.model, ids, mask).reduce_mean().float().cpu()
        torch.distributed.all_reduce(total, group=smp.get_dp_process_group())
        self.model.train()
        return total.item() / smp.dp_size()

    def evaluate_plain(self, plain: Any) -> float:
        """Evaluates as :meth:`evaluate` does, with a whole Hugging Face model on every rank."""
        total = torch.zeros(1)
        with torch.no_grad():
            for ids, mask in make_loader(self.args.batch_size, 4, LENGTH, VOCABULARY, True):
                total += plain(input_ids=ids, attention_mask=mask, labels=ids)["loss"].float()
        torch.distributed.all_reduce(total, group=smp.get_dp_process_group())
        return total.item() / smp.dp_size()

    def finish(self, **values: Any) -> None:
        assert self.num_hook_calls == 1
        smp.barrier()
        report(
            self.args.training_dir,
            losses=self.losses,
            means=self.means,
            num_params=self.num_params,
            total_steps=self.total_steps,
            **values,
        )
        if smp.rank() == 0:
            print("SMP training finished successfully")


def check_whole_file(job: Job, plain: Callable[[], nn.Module]) -> None:
    """The file at the end goes into a model of Hugging Face."""
    smp.barrier()
    if smp.rank() == 0:
        state = torch.load(Path(job.args.model_dir, "fullmodel.pt"), weights_only=True)
        missing, unexpected = plain().load_state_dict(state, strict=False)
        assert not unexpected and all(
            "attn" in n or "rotary" in n or "lm_head" in n for n in missing
        )
