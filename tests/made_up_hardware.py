"""A device for tests of plans, whose figures are round numbers."""

from smp.planning.hardware import Hardware, Link

MADE_UP = Hardware(
    name="made up",
    source="made up",
    flops={"fp32": 1e10},
    product_share=1.0,
    memory_bytes=10**9,
    memory_bytes_per_s=1e10,
    inside=Link(1e9, 1e-5),
    between=Link(1e9, 1e-5),
    host_copy_bytes_per_s=1e10,
    at_once=4,
)
