"""Client B: GPT-J over a pipeline, driven by a trainer object."""

from __future__ import annotations

import argparse
import inspect
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPTJConfig, GPTJForCausalLM

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch.nn import FusedLayerNorm  # noqa: F401
from tests.clients.scripts.data_pipeline import make_loader
from tests.clients.scripts.helpers import AnnealingLR, param_groups_of, report, set_seed

LENGTH, VOCABULARY = 16, 64


class Trainer:
    """Takes a model that is wrapped already, and looks at it as trainers do."""

    def __init__(self, model: Any, args: Any) -> None:
        self.model, self.args = model, args
        assert model.config.vocab_size == VOCABULARY, "unknown attributes are those of the model"
        assert isinstance(model, smp.model.DistributedModel)
        assert "DistributedModel" in model.__class__.__name__
        assert "kwargs" in inspect.signature(model.forward).parameters
        self.losses: list[float] = []

    @smp.step
    def train_step(
        model: Any, optimizer: Any, input_ids: Tensor, attention_mask: Tensor, args: Any
    ) -> Tensor:  # without self
        assert isinstance(args, argparse.Namespace) and isinstance(optimizer, torch.optim.Optimizer)
        loss = model(input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]
        model.backward(loss)
        return loss

    def train(self, loader: Any, optimizer: Any, scheduler: Any) -> None:
        """Trains without any call of ``optimizer.step()``, as the script does."""
        for ids, mask in loader:
            optimizer.zero_grad()
            loss = self.train_step(self.model, optimizer, ids, mask, self.args)
            scheduler.step()
            self.losses.append(loss.reduce_mean().item())

    def save(self, optimizer: Any, folder: Path) -> list[str]:
        gather_if_shard = self.args.gather_if_shard > 0
        keys: list[str] = []
        if not gather_if_shard:
            part = optimizer.local_state_dict(gather_if_shard=False)
            smp.save(part, str(folder / "optimizer.pt"), partial=True, v3=True)
        if smp.rdp_rank() == 0:
            state = self.model.state_dict(gather_to_rank0=True)
            keys = list(state)
            if smp.rank() == 0:
                content = {"model": state, "args": vars(self.args)}
                smp.save(content, str(folder / "model.pt"), partial=False, v3=not gather_if_shard)
        if gather_if_shard:
            part = optimizer.local_state_dict(gather_if_shard=True)
            if smp.rdp_rank() == 0:
                smp.save(part, str(folder / "optimizer.pt"), partial=True)
        smp.barrier()
        return keys


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gather_if_shard", type=int, default=1)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--model_dir", default=os.environ["SM_MODEL_DIR"])
    args = parser.parse_args()
    # transformers does this when it is imported, with what the launcher says.
    smp.init()
    assert smp.is_initialized()
    path = f"{args.model_dir}/pretrained"
    if smp.local_rank() == 0:
        set_seed(args.seed)
        config = GPTJConfig(
            vocab_size=VOCABULARY,
            n_positions=32,
            n_embd=32,
            n_layer=4,
            n_head=4,
            rotary_dim=4,
            n_inner=None,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=1,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        GPTJForCausalLM(config).save_pretrained(path)
    smp.barrier()
    model = AutoModelForCausalLM.from_pretrained(path)
    smp.init(
        {
            "ddp": True,
            "pipeline_parallel_degree": 2,
            "microbatches": 2,
            "active_microbatches": 2,
            "shard_optimizer_state": True,
            "prescaled_batch": True,
            "_match_weights": True,
            "offload_activations": True,
            "optimize": "memory",
            "auto_partition": True,
            "default_partition": 0,
            "static_mode": True,
            "fast_mode": True,
        }
    )
    plain: Any = GPTJForCausalLM.from_pretrained(path)
    model = smp.DistributedModel(model, trace_device="cpu", gradient_as_bucket_view=True)
    for layer in model.get_module().transformer.h:
        smp.set_activation_checkpointing(layer)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(param_groups_of(model), lr=1e-3))
    scheduler = AnnealingLR(optimizer, 1e-3, 1, 4)
    trainer = Trainer(model, args)
    loader = make_loader(4, 12, LENGTH, VOCABULARY)
    trainer.train(loader, optimizer, scheduler)
    expected = []
    if smp.pp_rank() == 0:
        for ids, mask in loader:
            loss = plain(ids, attention_mask=mask, labels=ids)["loss"]
            expected.append(loss.item())
    keys = trainer.save(optimizer, Path(args.model_dir))
    if smp.rank() == 0:
        assert keys == list(plain.state_dict())
        saved = torch.load(Path(args.model_dir, "model.pt"), weights_only=True)
        plain.load_state_dict(saved["model"])
    report(
        os.environ["SM_CHANNEL_TRAIN"],
        losses=trainer.losses,
        expected=expected,
        num_keys=len(keys),
        files=sorted(p.name for p in Path(args.model_dir).iterdir()),
    )


if __name__ == "__main__":
    main()
