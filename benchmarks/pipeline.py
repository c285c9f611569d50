"""smp against torch's 1F1B and against the ideal pipeline: ``python benchmarks/pipeline.py``.

Trains a GPT-style model, as plain modules and as Hugging Face GPT-J and Llama, on two ranks with
one thread each: smp with its own partition, `torch.distributed.pipelining` cut by hand into equal
blocks, and the model in one process, in turns and in the same processes. ``--pipelines-only``
leaves the one process out, which is shorter and says nothing of ideal and simulated times. With
``--ranks 4`` on two cores only the CPU seconds say something. Each case has processes of its own:
what one has kept must not count as the next one's memory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

from allocation_meter import preloaded
from environment import REPO, describe
from pipeline_report import AIMS, MAX_PREDICTION_ERROR
from run import launch

from smp import _C

SHAPE = {"num_layers": 8, "hidden": 512, "num_heads": 8, "vocab_size": 4096, "seq_len": 128}
QUICK = {"num_layers": 8, "hidden": 128, "num_heads": 4, "vocab_size": 1024, "seq_len": 64}
REPEATS = {4: 5, 8: 4, 16: 3}
TIMEOUT_S = 3600


def worker_config(args: argparse.Namespace, kind: str, microbatches: int) -> dict[str, Any]:
    shape = dict(QUICK if args.quick else SHAPE)
    shape |= {key: n for key in ("hidden", "vocab_size", "seq_len") if (n := getattr(args, key))}
    return {
        "shape": shape,
        "pipeline": args.pipeline,
        "active": in_flight(args, microbatches),
        "pipelines_only": args.pipelines_only,
        "microbatch_size": 4,
        "num_ranks": args.ranks,
        "kind": kind,
        "microbatches": microbatches,
        "repeats": args.repeats or REPEATS.get(microbatches, 3),
        "one_process_microbatches": 4 if args.quick else 2,
        # On more ranks than cores they would disturb each other.
        "one_process_everywhere": args.ranks <= len(os.sched_getaffinity(0)),
        "memory_weight": args.memory_weight,
        "cut": args.cut,
        "trace": str(args.trace / f"{kind}_{args.pipeline}_{microbatches}") if args.trace else "",
    }


def in_flight(args: argparse.Namespace, microbatches: int) -> int:
    """Microbatches that smp may have in flight."""
    if args.active == "library":
        policy = _C.make_policy(args.pipeline)
        return int(policy.default_active_microbatches(args.ranks, microbatches))
    return args.ranks if args.active == "ranks" else int(args.active)


def verdict(result: dict[str, Any]) -> list[str]:
    """Aims that one result of smp misses."""
    missed = []
    for name, most in AIMS.items():
        if name not in result:
            continue
        is_time = name in ("ratio_to_1f1b", "ratio_to_ideal")
        if is_time and result["num_processes"] > result["environment"]["num_cores"]:
            continue
        if result[name] > most:
            missed.append(f"{name} {result[name]:.3f} (at most {most})")
    is_alone = result["num_processes"] <= result["environment"]["num_cores"]
    if is_alone and "ratio_to_simulated" in result:
        if abs(result["ratio_to_simulated"] - 1) > MAX_PREDICTION_ERROR:
            missed.append(f"ratio_to_simulated {result['ratio_to_simulated']:.3f}")
    return missed


def show(result: dict[str, Any]) -> None:
    skipped = {"benchmark", "config", "environment", "repeats", "warmup", "num_processes"}
    print(f"--- {result['model']} m={result['microbatches']} {result['contender']}")
    for name, value in result.items():
        if name in skipped | {"model", "microbatches", "contender"}:
            continue
        values = value if isinstance(value, list) else [value]
        words = [f"{v:.5g}" if isinstance(v, float) else str(v) for v in values]
        print(f"    {name}: {' '.join(words)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model, under a minute")
    parser.add_argument("--models", nargs="+", default=["plain", "gptj", "llama"])
    parser.add_argument("--microbatches", nargs="+", type=int, default=[4, 8, 16])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--memory-weight", type=float, help="else as the library decides")
    parser.add_argument("--pipeline", default="interleaved")
    parser.add_argument(
        "--active",
        default="ranks",
        help="microbatches in flight: a number, 'ranks' (one per rank, as 1F1B has), or 'library' "
        "(what smp takes by itself)",
    )
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--vocab-size", type=int)
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--pipelines-only", action="store_true")
    parser.add_argument("--cut", default="", help="partition smp by hand in front of this module")
    parser.add_argument("--trace", type=Path, help="folder for a timeline of one step of each case")
    parser.add_argument("--out", type=Path, default=REPO / "build" / "bench" / "pipeline.jsonl")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.trace:
        args.trace = args.trace.absolute()
        args.trace.mkdir(parents=True, exist_ok=True)
    environment, missed = describe(), []
    for kind, microbatches in itertools.product(args.models, args.microbatches):
        results = launch(
            "pipeline_worker",
            args.ranks,
            worker_config(args, kind, microbatches),
            preloaded(os.environ, REPO / "build" / "bench"),
            TIMEOUT_S,
        )
        with args.out.open("a", encoding="utf-8") as file:
            for result in results:
                result["environment"] = environment
                file.write(json.dumps(result) + "\n")
                show(result)
                if result["contender"] == "smp":
                    missed += [f"{kind} m={microbatches}: {text}" for text in verdict(result)]
    print(f"results are in {args.out}")
    for text in missed:
        print(f"MISSED {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
