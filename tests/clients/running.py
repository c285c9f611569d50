"""Starts a client's script on several processes, and reads what its ranks leave."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.dist.pool import Pool
from tests.dist.processes import run_ranks
from tests.hosts.ranks import HostRanks
from tests.patience import PATIENCE_S

SCRIPTS = Path(__file__).parent / "scripts"


@dataclass
class Client:
    """A script with folders of its own, as a training job has them."""

    pool: Pool
    folder: Path
    script: str
    launcher: str = "torchrun"
    hosts: HostRanks | None = None
    """Where its ranks run; None: on this machine."""

    def run(
        self,
        world_size: int,
        argv: dict[str, Any] | None = None,
        parameters: dict[str, Any] | None = None,
        timeout: float = PATIENCE_S,
        more_env: dict[str, str] | None = None,
    ) -> list[dict[str, Any]]:
        """Runs the client on all ranks, and returns their reports after all have ended well.

        Args:
            world_size: number of processes.
            argv: arguments by name.
            parameters: parameters of model parallelism, as the service's launcher passes them.
            timeout: limit in seconds.
            more_env: further environment variables.
        """
        env = {"SM_NUM_GPUS": "0", "OMP_NUM_THREADS": "1", **(more_env or {})}
        names = {"SM_OUTPUT_DATA_DIR": "output", "SM_MODEL_DIR": "model"}
        names |= {"SM_CHANNEL_TRAIN": "train", "SM_CHANNEL_TEST": "test"}
        for variable, name in names.items():
            path = self.folder / name
            path.mkdir(exist_ok=True)
            env[variable] = str(path)
        if parameters is not None:
            env["SM_HP_MP_PARAMETERS"] = json.dumps(parameters)
        words = [word for key, value in (argv or {}).items() for word in (f"--{key}", str(value))]
        for old in (self.folder / "train").glob("result_*.json"):
            old.unlink()
        script = SCRIPTS / self.script
        if self.hosts is None:
            ended = run_ranks(self.pool, script, world_size, words, timeout, env, self.launcher)
        else:
            assert self.hosts.world_size == world_size
            ended = self.hosts.run_script(script, words, timeout=timeout, env=env)
        failed = [rank for rank in ended if rank.returncode != 0]
        failed.sort(key=lambda rank: rank.time)
        assert not failed, "\n".join(
            f"rank {rank.rank} ended with {rank.returncode}:\n{rank.output[-1500:]}"
            for rank in failed[:1]
        )
        self.outputs = [rank.output for rank in ended]
        results = sorted((self.folder / "train").glob("result_*.json"))
        assert len(results) == world_size
        return [
            json.loads((self.folder / "train" / f"result_{rank}.json").read_text())
            for rank in range(world_size)
        ]
