"""Makes smp run on the late device, by import: the device, its process groups, smp's kernels."""

from __future__ import annotations

import smp_late
import smp_late_device

import smp._C  # noqa: F401 - the kernels are registered with it
import tests.device  # noqa: F401 - the device itself

smp_late.install(*smp_late_device.addresses())
