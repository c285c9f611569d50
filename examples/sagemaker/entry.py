"""Entry point of a SageMaker training job without a `distribution`: starts the ranks of its host.

The service starts it once on each host and tells it by variables which hosts there are. With a
`distribution` (MPI, torch_distributed) the service starts the ranks itself, and the entry point is
the training script.

    entry.py [--ranks-per-host N] SCRIPT [arguments]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence

PORT = 29500


def command(env: Mapping[str, str], words: Sequence[str]) -> list[str]:
    """Returns the command that starts the ranks of this host.

    Args:
        env: variables, with ``SM_HOSTS``, ``SM_CURRENT_HOST`` and ``SM_NUM_GPUS``.
        words: arguments of the command line, without the name of the program.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks-per-host", type=int, help="one for each GPU, or one")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args(words)
    hosts = sorted(json.loads(env["SM_HOSTS"]))
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nnodes={len(hosts)}",
        f"--nproc-per-node={args.ranks_per_host or max(1, int(env['SM_NUM_GPUS']))}",
        f"--node-rank={hosts.index(env['SM_CURRENT_HOST'])}",
        f"--master-addr={hosts[0]}",
        f"--master-port={PORT}",
        args.script,
        *args.arguments,
    ]


if __name__ == "__main__":
    whole = command(os.environ, sys.argv[1:])
    os.execv(whole[0], whole)
