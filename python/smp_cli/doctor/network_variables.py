"""Checks variables of NCCL, Gloo and libfabric for combinations that are known not to work."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_PREFIXES = ("NCCL_", "GLOO_", "FI_", "RDMAV_", "OFI_", "UCX_", "TORCH_NCCL_")
_VIRTUAL = ("lo", "docker", "virbr")


def network_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that are set, by name."""
    return {name: env[name] for name in sorted(env) if name.startswith(_PREFIXES)}


def find_conflicts(env: Mapping[str, str], interfaces: set[str], root: Path) -> list[str]:
    """Describes contradictions between variables, or with the machine, and their remedies.

    Args:
        env: environment variables.
        interfaces: names of this host's interfaces.
        root: root of the file system, whose `sys` lists the devices.
    """
    nccl, gloo = (env.get(f"{name}_SOCKET_IFNAME", "") for name in ("NCCL", "GLOO"))
    gloo, exact = gloo.split(",")[0], nccl.removeprefix("=").split(",")[0]
    fits = {n for n in interfaces if n == exact or (nccl[:1] != "=" and n.startswith(exact))}
    is_named = bool(nccl) and nccl[0] != "^"
    folder = root / "sys" / "class" / "infiniband"
    devices = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    has_efa = any(name.startswith("efa") or "rdmap" in name for name in devices)
    rules = [
        (
            is_named and not fits,
            f"NCCL_SOCKET_IFNAME={nccl}, but this host has no such interface; it has "
            f"{', '.join(sorted(interfaces))}",
        ),
        (
            is_named and fits and all(name.startswith(_VIRTUAL) for name in fits),
            f"NCCL_SOCKET_IFNAME={nccl}: it does not lead to other hosts",
        ),
        (
            is_named and fits and gloo and gloo not in fits,
            f"NCCL_SOCKET_IFNAME={nccl} and GLOO_SOCKET_IFNAME={gloo} name different interfaces; a "
            "slow one makes the whole job slow; use one of them for both",
        ),
        (
            env.get("FI_PROVIDER") == "efa" and not has_efa,
            "FI_PROVIDER=efa, and this host has no EFA device (/sys/class/infiniband); NCCL falls "
            "back to TCP or fails: choose an instance and image with EFA, or unset it",
        ),
        (
            env.get("NCCL_NET") == "Socket" and has_efa,
            "NCCL_NET=Socket: the EFA device of this host is not used; unset it",
        ),
        (
            env.get("NCCL_IB_DISABLE") == "1" and devices and not has_efa,
            "NCCL_IB_DISABLE=1: the InfiniBand device of this host is not used; unset it",
        ),
        (
            env.get("NCCL_PROTO", "").upper() == "LL128" and has_efa,
            "NCCL_PROTO=LL128: older versions of the plugin for EFA (aws-ofi-nccl) corrupt data "
            "with it; unset it",
        ),
        (
            env.get("NCCL_P2P_DISABLE") == "1" and env.get("NCCL_SHM_DISABLE") == "1",
            "NCCL_P2P_DISABLE=1 and NCCL_SHM_DISABLE=1: GPUs of one host communicate over the "
            "network; unset one of them",
        ),
    ]
    return [problem for applies, problem in rules if applies]
