"""``llamafactory-cli train FILE`` over smp: ``torchrun --nproc-per-node 4 train.py FILE``.

LLaMA-Factory names the class of its trainer in its workflow of supervised fine-tuning, and has no
setting for another one. So this script puts the class made with the mixin in its place.
"""

from __future__ import annotations

from llamafactory.train.sft import workflow
from llamafactory.train.tuner import run_exp

import smp
from smp.integrations.trainer import SMPTrainerMixin

CONFIG = {"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True}


class SMPSeq2SeqTrainer(SMPTrainerMixin, workflow.CustomSeq2SeqTrainer):  # type: ignore[name-defined]
    """The trainer of ``stage: sft`` over a `DistributedModel`."""


if __name__ == "__main__":
    smp.init(CONFIG)
    workflow.CustomSeq2SeqTrainer = SMPSeq2SeqTrainer
    run_exp()
