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
    problems = [
        *_interface_problems(env, interfaces),
        *_fabric_problems(env, _devices(root / "sys" / "class" / "infiniband")),
    ]
    if env.get("NCCL_P2P_DISABLE") == "1" and env.get("NCCL_SHM_DISABLE") == "1":
        problems.append(
            "NCCL_P2P_DISABLE=1 and NCCL_SHM_DISABLE=1: GPUs of one host communicate over the "
            "network; unset one of them"
        )
    return problems


def _interface_problems(env: Mapping[str, str], interfaces: set[str]) -> list[str]:
    problems = []
    nccl = env.get("NCCL_SOCKET_IFNAME", "")
    exact = nccl.removeprefix("=").split(",")[0]
    if nccl and not nccl.startswith("^"):
        fits = {n for n in interfaces if n == exact or (nccl[0] != "=" and n.startswith(exact))}
        if not fits:
            problems.append(
                f"NCCL_SOCKET_IFNAME={nccl}, but this host has no such interface; it has "
                f"{', '.join(sorted(interfaces))}"
            )
        elif all(name.startswith(_VIRTUAL) for name in fits):
            problems.append(f"NCCL_SOCKET_IFNAME={nccl}: it does not lead to other hosts")
        gloo = env.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        if gloo and fits and gloo not in fits:
            problems.append(
                f"NCCL_SOCKET_IFNAME={nccl} and GLOO_SOCKET_IFNAME={gloo} name different "
                "interfaces; a slow one makes the whole job slow; use one of them for both"
            )
    return problems


def _fabric_problems(env: Mapping[str, str], devices: list[str]) -> list[str]:
    problems = []
    has_efa = any(name.startswith("efa") or "rdmap" in name for name in devices)
    if env.get("FI_PROVIDER") == "efa" and not has_efa:
        problems.append(
            "FI_PROVIDER=efa, and this host has no EFA device (/sys/class/infiniband); NCCL falls "
            "back to TCP or fails: choose an instance and image with EFA, or unset it"
        )
    if env.get("NCCL_NET") == "Socket" and has_efa:
        problems.append("NCCL_NET=Socket: the EFA device of this host is not used; unset it")
    if env.get("NCCL_IB_DISABLE") == "1" and devices and not has_efa:
        problems.append(
            "NCCL_IB_DISABLE=1: the InfiniBand device of this host is not used; unset it"
        )
    if env.get("NCCL_PROTO", "").upper() == "LL128" and has_efa:
        problems.append(
            "NCCL_PROTO=LL128: older versions of the plugin for EFA (aws-ofi-nccl) corrupt data "
            "with it; unset it"
        )
    return problems


def _devices(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
