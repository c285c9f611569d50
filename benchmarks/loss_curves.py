"""Loss curves of a GPT with state or products in fewer bits, next to three seeds with FP32 state.

The text is the ``.py`` files of the installed Python, in bytes. A seed decides the weights and the
order of the samples; all storages begin with the first one. One process, one thread, one JSON line
per curve: mean losses of twenty equal spans. The last lines say how far each curve ends from the
mean of the seeds with FP32 state in its precision, and how far these are apart. The whole needs
hours on one core:

    python benchmarks/loss_curves.py
    python benchmarks/loss_curves.py --steps 300 --layers 4 --hidden 128   # minutes
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from models import Gpt, GptShape
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

import smp

SPANS = 20
SEEDS = 3


@dataclass(frozen=True)
class Storage:
    """Bits of parameters, state and products: keys of the configuration, options of `FusedAdam`."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def precision(self) -> str:
        return "bf16" if self.config else "fp32"


def half(masters: str) -> dict[str, Any]:
    return {"bf16": True, "bf16_masters": masters}


PLAIN = [Storage("fp32"), Storage("bf16 with fp32 masters", half("fp32"))]
STORAGES = [
    Storage("bf16 moments", {}, {"state_dtype": "bf16"}),
    Storage("int8 moments", {}, {"state_dtype": "int8"}),
    Storage("bf16 moments to nearest", {}, {"state_dtype": "bf16", "stochastic_rounding": False}),
    Storage("residues, bf16 moments", half("residue"), {"state_dtype": "bf16"}),
    Storage("no masters, bf16 moments", half("none"), {"state_dtype": "bf16"}),
    Storage("residues, int8 moments", half("residue"), {"state_dtype": "int8"}),
    Storage("no masters, int8 moments", half("none"), {"state_dtype": "int8"}),
    Storage("fp8 rowwise", {"bf16": True, "fp8": "rowwise"}),
    Storage("fp8 tensorwise", {"bf16": True, "fp8": "tensorwise"}),
]


def text_of_python(most_bytes: int) -> Tensor:
    """Returns the bytes of the standard library's files, in the order of their names."""
    folder, parts, size = Path(sysconfig.get_paths()["stdlib"]), [], 0
    for path in sorted(folder.rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= most_bytes:
            break
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


def train(storage: Storage, seed: int, text: Tensor, args: argparse.Namespace) -> list[float]:
    """Returns the losses of a run."""
    smp.init(storage.config)
    torch.manual_seed(seed)
    shape = GptShape(args.layers, args.hidden, args.heads, 256, args.length)
    model = smp.DistributedModel(Gpt(shape, args.layers))
    inner = smp.optimizers.FusedAdam(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, **storage.options
    )
    optimizer = smp.DistributedOptimizer(inner)
    warmup = max(1, args.steps // 20)
    scheduler = LambdaLR(inner, lambda step: min(1.0, (step + 1) / warmup))
    generator = torch.Generator().manual_seed(seed)

    @smp.step
    def train_step(ids: Tensor) -> Tensor:
        loss: Tensor = model(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        model.backward(loss)
        return loss

    losses = []
    for _ in range(args.steps):
        begins = torch.randint(len(text) - args.length - 1, (args.batch,), generator=generator)
        ids = torch.stack([text[b : b + args.length + 1] for b in begins.tolist()]).long()
        losses.append(train_step(ids).reduce_mean().item())
        smp.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    smp.shutdown()
    return losses


def spans(losses: list[float]) -> list[float]:
    size = max(1, len(losses) // SPANS)
    return [sum(losses[i : i + size]) / size for i in range(0, len(losses) - size + 1, size)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("steps", 1000), ("layers", 9), ("hidden", 512), ("heads", 8),
                          ("length", 128), ("batch", 8), ("text-bytes", 20_000_000)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--only", default="", help="part of the names of storages")
    args = parser.parse_args()
    torch.set_num_threads(1)
    text = text_of_python(args.text_bytes)
    ends: dict[str, list[float]] = {}
    chosen = [s for s in STORAGES if args.only in s.name]
    precisions = {s.precision for s in chosen}
    plain = [(s, seed) for s in PLAIN if s.precision in precisions for seed in range(SEEDS)]
    for storage, seed in [*plain, *((s, 0) for s in chosen)]:
        begun = time.perf_counter()
        means = spans(train(storage, seed, text, args))
        key = storage.precision if storage in PLAIN else storage.name
        ends.setdefault(key, []).append(means[-1])
        print(json.dumps({
            "benchmark": "loss_curves", "contender": storage.name, "seed": seed,
            "config": vars(args), "losses": [round(mean, 4) for mean in means],
            "seconds": round(time.perf_counter() - begun, 1),
        }), flush=True)  # fmt: skip
    for storage in chosen:
        seeds = ends[storage.precision]
        center = sum(seeds) / len(seeds)
        spread = max(abs(end - center) for end in seeds)
        off = ends[storage.name][0] - center
        print(
            f"{storage.name}: {ends[storage.name][0] / seeds[0] - 1:+.2%} from the same seed, "
            f"{off:+.4f} from the mean {center:.4f} of {SEEDS} seeds, "
            f"which are up to {spread:.4f} from it: {'within' if abs(off) <= spread else 'OUTSIDE'}"
        )


if __name__ == "__main__":
    main()
