"""Part `attention`: which kernel `scaled_dot_product_attention` takes, and how fast it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.contenders import smp_layer
from benchmarks.gpu.figures import Figures
from benchmarks.gpu.rows import Row

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
#: Parts of names of kernels, the first that fits; a product of matrices alone is "math".
KERNELS = (
    ("cudnn", "cudnn"),
    ("flash", "flash"),
    ("fmha", "efficient"),
    ("mem_eff", "efficient"),
    ("attention", "efficient"),
)
#: Operators of PyTorch on any device, where there are no kernels to look at.
OPERATORS = (
    ("_cudnn_attention", "cudnn"),
    ("_flash_attention", "flash"),
    ("_efficient_attention", "efficient"),
    ("_attention_math", "math"),
)


#: Masks of PyTorch's function, and those that users of a layer give.
MASKS = ("no mask, causal", "all ones, a causal mask", "padding at the right, a causal mask")
LAYER_MASKS = ("no mask", "all ones", "padding")


@dataclass(frozen=True)
class Sizes:
    """Sizes of queries, keys and values."""

    batch: int = 8
    heads: int = 16
    seq: int = 2048
    head: int = 256
    repeats: int = 10

    @property
    def flops(self) -> float:
        """Operations of a causal forward: two products, half of each."""
        return 2.0 * self.batch * self.heads * self.seq**2 * self.head


TINY = Sizes(2, 2, 16, 8, 2)


def backend_of(names: Iterable[str], is_cuda: bool) -> str:
    """Returns the backend that ran, by names of kernels; on a CPU by names of operators."""
    known = KERNELS if is_cuda else OPERATORS
    for name in (n.lower() for n in names):
        for part, backend in known:
            if part in name:
                return backend
    return "math"


def names_of(work: Callable[[], object], is_cuda: bool) -> list[str]:
    """Returns the names of the kernels that the work runs; on a CPU those of its operators."""
    work()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if is_cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        work()
        if is_cuda:
            torch.cuda.synchronize()
    kind = "CUDA" if is_cuda else "CPU"
    return [e.name for e in profile.events() if e.device_type.name == kind]


def masks(sizes: Sizes, device: str) -> dict[str, tuple[Tensor | None, bool]]:
    """Name to a mask and whether `is_causal` is said. Those of Hugging Face contain causality."""
    full = torch.ones(sizes.seq, sizes.seq, dtype=torch.bool, device=device)
    causal = full.tril()[None, None].expand(sizes.batch, 1, -1, -1)
    lengths = torch.linspace(sizes.seq // 2, sizes.seq, sizes.batch, device=device).long()
    keys = torch.arange(sizes.seq, device=device) < lengths[:, None]
    padded = causal & keys[:, None, None, :]
    found = ((None, True), (causal.contiguous(), False), (padded, False))
    return dict(zip(MASKS, found, strict=True))


def measure(figures: Figures, name: str, qkv: list[Tensor], work: Callable[[], Tensor]) -> None:
    """Backend, forward, and forward with backward of one case."""
    device = figures.device
    sizes = sizes_of(figures)
    gradient = torch.randn_like(work())

    def both() -> None:
        torch.autograd.grad(work(), qkv, gradient)

    def forward() -> None:
        with torch.no_grad():
            work()

    seen = names_of(forward, device.is_cuda)
    backend = backend_of(seen, device.is_cuda)
    for way, run, times in (("forward", forward, 1.0), ("forward and backward", both, 3.5)):
        seconds = device.seconds(run, sizes.repeats)
        figures.add(
            f"{name}: {way}",
            seconds * 1e3,
            "ms",
            note=f"{backend}, {times * sizes.flops / seconds / 1e12:.3g} TFLOP/s",
            backend=backend,
            kernels=sorted(set(seen))[:8],
        )


def sizes_of(figures: Figures) -> Sizes:
    return TINY if figures.device.is_dry else Sizes()


def make(figures: Figures, mask: str) -> tuple[list[Tensor], Callable[[], Tensor]]:
    """Returns queries, keys and values, and a call of PyTorch's function with them and a mask."""
    sizes, device = sizes_of(figures), figures.device.kind
    shape = (sizes.batch, sizes.heads, sizes.seq, sizes.head)
    torch.manual_seed(1)
    qkv = [torch.randn(shape, device=device).bfloat16().requires_grad_() for _ in range(3)]
    given, causal = masks(sizes, device)[mask]
    return qkv, lambda: F.scaled_dot_product_attention(*qkv, given, is_causal=causal)


def function(figures: Figures, mask: str) -> None:
    """PyTorch's function by itself."""
    measure(figures, f"sdpa, {mask}", *make(figures, mask))


def forced(figures: Figures, mask: str, backend: str) -> None:
    """Time of a forward with one backend, or what it says to a mask."""
    name = f"sdpa, {mask}, {backend} only"
    _, work = make(figures, mask)

    def run() -> None:
        with torch.no_grad(), sdpa_kernel(BACKENDS[backend]):
            work()

    try:
        run()
    except RuntimeError as error:
        if "CUDA error" in str(error):  # a backend that refuses leaves the device alone
            raise
        figures.skip(name, f"refused: {str(error).strip().splitlines()[0][:160]}")
        return
    figures.add(name, figures.device.seconds(run, 3, warmup=1) * 1e3, "ms")


def layer(figures: Figures, mask: str) -> None:
    """A layer of `smp.nn` with a mask as users give it: what runs inside."""
    sizes = sizes_of(figures)
    ids = torch.ones(sizes.batch, sizes.seq, dtype=torch.long, device=figures.device.kind)
    lengths = torch.linspace(sizes.seq // 2, sizes.seq, sizes.batch, device=ids.device).long()
    padded = (torch.arange(sizes.seq, device=ids.device) < lengths[:, None]).long()
    batch = {"input_ids": ids, "labels": ids}
    batch |= {"all ones": {"attention_mask": ids}, "padding": {"attention_mask": padded}}.get(
        mask, {}
    )
    hidden = sizes.heads * sizes.head
    with smp_layer(figures.device, hidden, sizes.heads, sizes.seq, sizes.batch) as step:

        def work() -> None:
            step(batch)

        backend = backend_of(names_of(work, figures.device.is_cuda), figures.device.is_cuda)
        seconds = figures.device.seconds(work, sizes.repeats)
    figures.add(
        f"smp.nn, a layer and its ends, {mask}: forward and backward",
        seconds * 1e3,
        "ms",
        note=backend,
        backend=backend,
    )


def rows(part: str, is_dry: bool) -> list[Row]:
    found = [Row(f"sdpa, {mask}", partial(function, mask=mask)) for mask in MASKS]
    found += [Row(f"smp.nn, {mask}", partial(layer, mask=mask)) for mask in LAYER_MASKS]
    return found + [
        Row(f"sdpa, {mask}, {backend} only", partial(forced, mask=mask, backend=backend))
        for mask in MASKS
        for backend in BACKENDS
    ]
