"""The one process-wide object: who this process is, and everything that is running.

`init` makes it, `shutdown` ends it, `current` returns it. The environment is read here and
nowhere else.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from smp import _C, process_hooks
from smp.config import (
    Config,
    advice,
    check_available,
    check_same_topology,
    check_world,
)
from smp.config_sources import (
    compare_configs,
    merge_sources,
    read_launcher_config,
    read_user_config,
)
from smp.groups import GROUP_KINDS, Groups, TorchGroups, build_groups
from smp.launch import Launch, read_launch, with_hosts
from smp.links import Links
from smp.rendezvous import (
    Hello,
    MeetingPoint,
    exchange_hellos,
    machine_id,
    raise_first_error,
    say_farewell,
)
from smp.settings import (
    Settings,
    check_devices,
    choose_device_type,
    device_of,
    host_advice,
    read_settings,
)

logger = logging.getLogger("smp")

PeerFailure = _C.PeerFailure

UserConfig = Mapping[str, object] | str | os.PathLike[str] | None
