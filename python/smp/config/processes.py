"""Checks a configuration against the number of processes, and against the one before."""

from __future__ import annotations

import itertools
import math
import operator

from smp.config.schema import TOPOLOGY_KEYS, Config, config_error


def check_world(config: Config, world_size: int) -> None:
    """Checks degrees against the number of processes: rows 4, 5 and 10 of the errors.

    Raises:
        ValueError: degrees do not fit; the text is the same on every rank.
    """
    degrees = _degrees_of_replica(config)
    per_replica = math.prod(degrees.values())
    if world_size % per_replica != 0:
        products = itertools.accumulate(degrees.values(), operator.mul)
        pairs = zip(degrees, products, strict=True)
        key = next(key for key, product in pairs if world_size % product != 0)
        raise config_error(
            key,
            getattr(config, key),
            f"{world_size} processes cannot form groups of {' * '.join(degrees)} = "
            f"{' * '.join(map(str, degrees.values()))} = {per_replica}",
            f"start a multiple of {per_replica} processes or lower a degree",
        )
    pp, tp = config.pipeline_parallel_degree, config.tensor_parallel_degree
    if world_size > pp and not config.ddp:
        raise config_error(
            "ddp",
            False,
            f"{world_size} processes with pipeline_parallel_degree {pp} are "
            f"{world_size // pp} data-parallel ranks",
            f"set ddp=True or start {pp} processes",
        )
    if config.device_speeds is not None and len(config.device_speeds) != world_size:
        raise config_error(
            "device_speeds",
            list(config.device_speeds),
            f"has {len(config.device_speeds)} speeds for {world_size} processes",
            f"give one speed for each of the {world_size} processes, in the order of their ranks",
        )
    is_sharded = config.shard_size(world_size // per_replica) > 1
    if config.redundancy and world_size > per_replica and not is_sharded:
        raise config_error(
            "redundancy",
            config.redundancy,
            f"{world_size} processes hold {world_size // per_replica} replicas of the model, which "
            "have copies of each state",
            f"leave redundancy out, or start {per_replica} processes",
        )
    needs_replicas = config.on_failure != "end" and not (config.redundancy and world_size > 1)
    if world_size == per_replica and needs_replicas:
        raise config_error(
            "on_failure",
            config.on_failure,
            f"{world_size} processes hold one replica of the model, without which nothing is left",
            f'start at least {2 * per_replica} processes, or set on_failure="end" (on several '
            'processes, on_failure="spare" with redundancy=1 keeps copies)',
        )
    replicas, degree = world_size // (pp * tp), config.sharded_data_parallel_degree
    if replicas % degree != 0:
        cp = config.context_parallel_degree
        size = str(replicas) if cp == 1 else f"times context_parallel_degree, {replicas}"
        raise config_error(
            "sharded_data_parallel_degree",
            degree,
            f"does not divide the reduced data-parallel size {size}",
            f"use a divisor of {replicas}",
        )


def _degrees_of_replica(config: Config) -> dict[str, int]:
    """Returns the degrees whose product is the number of ranks with one batch each."""
    keys = ["pipeline_parallel_degree", "tensor_parallel_degree"]
    if config.context_parallel_degree > 1:
        keys.append("context_parallel_degree")
    return {key: getattr(config, key) for key in keys}


def check_same_topology(current: Config, new: Config) -> None:
    """Raises ValueError if a second init would change the layout of the ranks."""
    for key in TOPOLOGY_KEYS:
        before, after = getattr(current, key), getattr(new, key)
        if before != after:
            raise config_error(
                key,
                after,
                f"smp is already initialized with {before!r}",
                "call smp.shutdown() first or keep the value",
            )


def advice(config: Config) -> list[str]:
    """Returns warnings about settings that work but are probably not meant."""
    result = []
    tp = config.tensor_parallel_degree
    if tp & (tp - 1):
        result.append(f"smp config: tensor_parallel_degree={tp} is not a power of two")
    return result
