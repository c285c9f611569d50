"""Part `kernels`: operators and optimizers against references."""

from __future__ import annotations

from benchmarks.gpu.rows import Row
from benchmarks.gpu.tests_of import left_out, row_of

FILES = (
    "tests/gpu/test_fused_ops.py",
    "tests/gpu/test_fused_optimizers.py",
    "tests/gpu/test_fp8.py",
    "tests/gpu/test_host_moments.py",
    "tests/unit/test_optim_ops.py",
)
#: Arguments of pytest in a dry run: few tests of these files.
DRY = ("tests/unit/test_optim_ops.py", "-k", "clip_divisor_is_that")


def rows(part: str, is_dry: bool) -> list[Row]:
    # Tests of operators take milliseconds each, and no kernel has run yet: whole products.
    return [
        left_out(path) if is_dry and path != DRY[0] else row_of(path, DRY[1:], "all")
        for path in FILES
    ]
