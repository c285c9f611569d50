"""Client E: pretraining of a BERT model over a pipeline, configured by the launcher alone."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import _LRScheduler

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch.nn import FusedLayerNorm
from smdistributed.modelparallel.torch.optimizers import FusedLAMB
from tests.clients.scripts.helpers import report, set_seed

VOCABULARY, HIDDEN, LENGTH, LAYERS = 40, 16, 8, 4


class PolyWarmUp(_LRScheduler):
    """Insists on an optimizer of torch, as its base class does."""

    def __init__(self, optimizer: Any, warmup: int, total: int) -> None:
        self.warmup, self.total = warmup, total
        super().__init__(optimizer)

    def step(self, epoch: int | None = None) -> None:
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        for group, lr in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            share = (self.last_epoch + 1) / self.total
            group["lr"] = lr * min(1.0, (self.last_epoch + 1) / self.warmup) * (1 - share) ** 0.5


class Layer(nn.Module):
    """Takes and returns a tuple, so that layers can follow each other in a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.dense = nn.Linear(HIDDEN, HIDDEN)
        self.LayerNorm = FusedLayerNorm(HIDDEN, eps=1e-12)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, mask = inputs
        query, key, value = self.query_key_value(hidden).chunk(3, dim=-1)
        scores = query @ key.transpose(-1, -2) / HIDDEN**0.5 + mask[:, None, :]
        mixed = self.dense(scores.softmax(dim=-1) @ value)
        return self.LayerNorm(hidden + mixed), mask


class Bert(nn.Module):
    """Masked tokens and the next sentence; layers in a sequence or in a list."""

    def __init__(self, use_sequential: bool) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, HIDDEN)
        self.word_embeddings.weight.data.normal_(mean=0.0, std=0.1)
        self.use_sequential = use_sequential
        layers = [Layer() for _ in range(LAYERS)]
        self.layer = nn.Sequential(*layers) if use_sequential else nn.ModuleList(layers)
        self.seq_relationship = nn.Linear(HIDDEN, 2)
        self.transform_bias = nn.Parameter(torch.zeros(VOCABULARY))

    def forward(self, ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        mask = (1.0 - attention_mask.to(self.word_embeddings.weight.dtype)) * -10000.0
        state = (self.word_embeddings(ids), mask)
        if self.use_sequential:
            state = self.layer(state)
        else:
            for layer in self.layer:
                state = layer(state)
        hidden = state[0]
        scores = nn.functional.linear(hidden, self.word_embeddings.weight, self.transform_bias)
        return scores, self.seq_relationship(hidden[:, 0])


class Criterion(nn.Module):
    def forward(self, scores: Tensor, relation: Tensor, labels: Tensor, next_: Tensor) -> Tensor:
        tokens = nn.functional.cross_entropy(
            scores.reshape(-1, VOCABULARY), labels.reshape(-1), ignore_index=-1
        )
        result: Tensor = tokens + nn.functional.cross_entropy(relation, next_)
        return result


@smp.step
def smp_step(
    args: Any, device: Any, ids: Tensor, mask: Tensor, labels: Tensor, next_: Tensor, model: Any,
    optimizer: Any, criterion: Any, step: int,
) -> Tensor:  # fmt: skip
    from smdistributed.modelparallel.test.torch.utils import dump_model, verify

    assert callable(dump_model) and callable(verify)
    assert isinstance(device, torch.device) and isinstance(step, int)
    assert isinstance(criterion, nn.Module) and hasattr(optimizer, "param_groups")
    assert ids.shape[0] == 2, "tensors are cut; all else comes whole"
    scores, relation = model(ids, mask)
    loss = criterion(scores, relation, labels, next_)
    if args.smp:
        model.backward(loss / args.accumulation)
    else:
        (loss / args.accumulation).backward()
    return loss


def batch_of(step: int, replica: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(50 * step + replica)
    ids = torch.randint(0, VOCABULARY, (8, LENGTH), generator=generator)
    labels = torch.where(torch.rand(8, LENGTH, generator=generator) < 0.3, ids, -1)
    labels[:, 0] = ids[:, 0]
    mask = torch.ones(8, LENGTH, dtype=torch.long)
    mask[:, -1] = 0
    return ids, mask, labels, torch.randint(0, 2, (8,), generator=generator)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    exempt = ["bias", "gamma", "beta", "LayerNorm"]
    groups = [
        {"params": [p for n, p in named if not any(e in n for e in exempt)], "weight_decay": 0.01},
        {"params": [p for n, p in named if any(e in n for e in exempt)], "weight_decay": 0.0},
    ]
    assert all(group["params"] for group in groups)
    return groups


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name, default in (("smp", 1), ("use_sequential", 1), ("max_steps", 4), ("resume_step", 0),
                          ("accumulation", 2), ("keep", 1), ("seed", 42)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--output_dir", default=os.environ["SM_OUTPUT_DATA_DIR"])
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.smp:
        smp.init()
        assert smp.is_initialized()
    # Also where nothing was initialised.
    local_rank = smp.local_rank()
    assert local_rank == int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cpu")
    replica = smp.dp_rank() if args.smp else 0
    set_seed(args.seed)
    model: Any = Bert(args.use_sequential > 0)
    checkpoint = None
    if args.resume_step:
        file = f"{args.output_dir}/ckpt_{args.resume_step}.pt"
        checkpoint = smp.load(file, partial=True)
    if args.smp:
        model = smp.DistributedModel(model)
    model.to(device)
    optimizer: Any = FusedLAMB(groups_of(model), lr=0.02)
    if args.smp:
        optimizer = smp.DistributedOptimizer(optimizer)
    assert isinstance(optimizer, torch.optim.Optimizer)
    scheduler = PolyWarmUp(optimizer, 2, 20)
    if checkpoint is not None:
        model.load_state_dict(checkpoint["model"], strict=False)
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
    criterion = Criterion()
    model.train()
    losses = []
    run = smp_step if args.smp else None
    for step in range(args.resume_step, args.max_steps):
        ids, mask, labels, next_ = batch_of(step % 2, replica)
        if run is not None:
            loss = run(args, device, ids, mask, labels, next_, model, optimizer, criterion, step)
            losses.append(loss.reduce_mean().item())
        else:
            scores, relation = model(ids, mask)
            plain = criterion(scores, relation, labels, next_)
            (plain / args.accumulation).backward()
            losses.append(plain.item())
        if (step + 1) % args.accumulation == 0:
            scheduler.step()
            optimizer.step()
            for parameter in model.parameters():
                parameter.grad = None
            if args.smp:
                save(args, model, optimizer, scheduler, step + 1)
    if args.smp:
        finish(args, model, losses)
    else:
        Path(os.environ["SM_CHANNEL_TRAIN"], "result_0.json").write_text(f'{{"losses": {losses}}}')


def save(args: Any, model: Any, optimizer: Any, scheduler: Any, step: int) -> None:
    if smp.dp_rank() == 0:
        content = {
            "model": model.local_state_dict(),
            "optimizer": optimizer.local_state_dict(),
            "scheduler": {"last_epoch": scheduler.last_epoch},
        }
        file = Path(args.output_dir, f"ckpt_{step}.pt")
        smp.save(content, str(file), partial=True)
        assert Path(f"{file}_{smp.mp_rank()}").is_file()
        old = Path(args.output_dir, f"ckpt_{step - 2 * args.accumulation}.pt_{smp.mp_rank()}")
        old.unlink(missing_ok=True)
        # At the end all ranks of a replica save their local parts as one file.
        smp.save({"model": model.local_state_dict()}, f"{args.output_dir}/full.pt", partial=False)
    smp.barrier()


def finish(args: Any, model: Any, losses: list[float]) -> None:
    from smdistributed.modelparallel.torch.utils import rmsg

    assert "done" in rmsg("done")
    smp.dp_barrier()
    smp.mp_barrier()
    if smp.rank() == 0:
        state = torch.load(Path(args.output_dir, "full.pt"), weights_only=True)["model"]
        state = {k: v for k, v in state.items() if k != "_smp_is_partial"}
        Bert(args.use_sequential > 0).load_state_dict(state)
    report(
        os.environ["SM_CHANNEL_TRAIN"],
        losses=losses,
        num_local=len(list(model.local_parameters())),
        files=sorted(p.name for p in Path(args.output_dir).iterdir()),
    )


if __name__ == "__main__":
    main()
