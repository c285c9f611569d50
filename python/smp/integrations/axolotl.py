"""A plugin of Axolotl, which its configuration names beside the key ``smp``.

Hooks and settings of Axolotl are used, and nothing of it is replaced. From the setting
``trainer_cls`` both of its builders take a class of trainers and still pass the models; the hook
``get_trainer_cls`` would leave the models out with ``rl``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from axolotl.core.trainers import AxolotlTrainer
from axolotl.core.trainers.dpo.trainer import AxolotlDPOTrainer
from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

import smp._C as _C
from smp.integrations.trainer import SMPTrainerMixin
from smp.world import comm, runtime

_LAYOUT = "set the layout under smp"
# Settings that are refused, with what to do instead.
_REFUSED = {
    "fsdp": _LAYOUT,
    "fsdp_config": _LAYOUT,
    "deepspeed": _LAYOUT,
    "tensor_parallel_size": _LAYOUT,
    "context_parallel_size": _LAYOUT,
    "expert_parallel_size": _LAYOUT,
    "dp_shard_size": _LAYOUT,
    "dp_replicate_size": _LAYOUT,
    "activation_offloading": "set offload_activations under smp",
    "layer_offloading": "a rank holds the layers of its own stage; leave it out",
    "relora": "its callback merges adapters of the whole model; leave it out",
    "qat": "it converts the whole model after the training; leave it out",
}


class SMPArguments(BaseModel):
    """Keys that the plugin adds: ``smp`` is the configuration of `smp.init`."""

    smp: dict[str, Any]


class SMPAxolotlTrainer(SMPTrainerMixin, AxolotlTrainer):
    """Axolotl's trainer of causal models over a `DistributedModel`."""


class SMPAxolotlDPOTrainer(SMPTrainerMixin, AxolotlDPOTrainer):
    """Axolotl's trainer of ``rl: dpo`` and ``rl: ipo`` over a `DistributedModel`."""


class SMPPlugin(BasePlugin):
    """Lets ``axolotl train`` train over `smp`: ``plugins: [smp.integrations.axolotl.SMPPlugin]``.

    Other commands of Axolotl do not call `smp.init`.

    Raises:
        ValueError: a setting asks for another engine or for what smp does not do.
        TypeError: the trainer has no `SMPTrainerMixin`.
    """

    _trainer: Any = None

    def get_input_args(self) -> str:
        """Returns the name of the class with the keys of the plugin."""
        return f"{__name__}.{SMPArguments.__name__}"

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> None:
        """Calls `smp.init`, and sets what follows from it. Collective over all ranks.

        This is the first hook after the configuration is complete, and Axolotl computes the number
        of steps after it.
        """
        if preprocess:
            return
        check(cfg)
        runtime.init(cfg.smp.to_dict())
        # Axolotl takes each process for a replica and moves the whole model to its device.
        replicas = comm.rdp_size() if cfg.smp.prescaled_batch else comm.dp_size()
        cfg.batch_size = cfg.micro_batch_size * cfg.gradient_accumulation_steps * replicas
        cfg.ddp, cfg.device_map = False, None
        cfg.include_tkps = False  # sums over all processes in each microbatch
        kind = SMPAxolotlDPOTrainer if cfg.rl in ("dpo", "ipo") else SMPAxolotlTrainer
        if not cfg.rl or kind is SMPAxolotlDPOTrainer:
            cfg.trainer_cls = cfg.trainer_cls or f"{__name__}.{kind.__name__}"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Keeps the trainer, and checks that it trains over smp."""
        if not isinstance(trainer, SMPTrainerMixin):
            raise TypeError(
                f"{_C.rank_prefix()}{type(trainer).__name__}, which Axolotl has chosen, does not "
                "train over smp; smp runs causal models and rl 'dpo' and 'ipo'. A class of your "
                "own in trainer_cls has SMPTrainerMixin as its first base"
            )
        self._trainer = trainer

    def post_train(self, cfg: Any, model: Any) -> None:
        """Saves the trained model. Collective over all ranks.

        Axolotl calls this hook before it saves, and again at its end. The first process of each
        host would save the plain model, most of whose parameters are on other ranks.
        """
        if self._trainer is not None:
            self._trainer.save_model(cfg.output_dir)
            cfg.local_rank, self._trainer = None, None


def check(cfg: Mapping[str, Any]) -> None:
    """Raises ValueError if a setting asks for another engine or for what smp does not do."""
    for name, remedy in _REFUSED.items():
        value = cfg.get(name)
        if value and value != 1:
            raise ValueError(
                f"{_C.rank_prefix()}{name}: {value!r} of Axolotl cannot be used together with smp; "
                f"{remedy}"
            )
