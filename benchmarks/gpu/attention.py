"""Part `attention`: which kernel `scaled_dot_product_attention` takes, and how fast it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.contenders import smp_layer
from benchmarks.gpu.figures import Figures

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
    return {
        "no mask, causal": (None, True),
        "all ones, a causal mask": (causal.contiguous(), False),
        "padding at the right, a causal mask": (causal & keys[:, None, None, :], False),
    }


def measure(figures: Figures, name: str, qkv: list[Tensor], work: Callable[[], Tensor]) -> None:
    """Backend, forward, and forward with backward of one case."""
    device = figures.device
    repeats = (TINY if device.is_dry else Sizes()).repeats
    sizes = TINY if device.is_dry else Sizes()
    gradient = torch.randn_like(work())

    def both() -> None:
        torch.autograd.grad(work(), qkv, gradient)

    def forward() -> None:
        with torch.no_grad():
            work()

    seen = names_of(forward, device.is_cuda)
    backend = backend_of(seen, device.is_cuda)
    for way, run, times in (("forward", forward, 1.0), ("forward and backward", both, 3.5)):
        seconds = device.seconds(run, repeats)
        figures.add(
            f"{name}: {way}",
            seconds * 1e3,
            "ms",
            note=f"{backend}, {times * sizes.flops / seconds / 1e12:.3g} TFLOP/s",
            backend=backend,
            kernels=sorted(set(seen))[:8],
        )


def functions(figures: Figures, sizes: Sizes) -> None:
    """PyTorch's function by itself, and what each backend says to a mask."""
    device = figures.device.kind
    shape = (sizes.batch, sizes.heads, sizes.seq, sizes.head)
    torch.manual_seed(1)
    qkv = [torch.randn(shape, device=device).bfloat16().requires_grad_() for _ in range(3)]
    for name, (mask, causal) in masks(sizes, device).items():

        def work(mask: Tensor | None = mask, causal: bool = causal) -> Tensor:
            return F.scaled_dot_product_attention(*qkv, mask, is_causal=causal)

        with figures.measuring(name):
            measure(figures, f"sdpa, {name}", qkv, work)
        for backend, kind in BACKENDS.items():
            forced(figures, f"sdpa, {name}, {backend} only", kind, work)


def forced(figures: Figures, name: str, kind: SDPBackend, work: Callable[[], Tensor]) -> None:
    """Time of a forward with one backend, or what it says."""

    def run() -> None:
        with torch.no_grad(), sdpa_kernel(kind):
            work()

    try:
        run()
    except RuntimeError as error:
        figures.skip(name, f"refused: {str(error).strip().splitlines()[0][:160]}")
        return
    figures.add(name, figures.device.seconds(run, 3, warmup=1) * 1e3, "ms")


def layers(figures: Figures, sizes: Sizes) -> None:
    """A layer of `smp.nn` with masks as users give them: what runs inside."""
    hidden = sizes.heads * sizes.head
    ids = torch.ones(sizes.batch, sizes.seq, dtype=torch.long, device=figures.device.kind)
    lengths = torch.linspace(sizes.seq // 2, sizes.seq, sizes.batch, device=ids.device).long()
    padded = (torch.arange(sizes.seq, device=ids.device) < lengths[:, None]).long()
    with smp_layer(figures.device, hidden, sizes.heads, sizes.seq, sizes.batch) as step:
        for name, mask in (("no mask", None), ("all ones", ids), ("padding", padded)):
            with figures.measuring(f"smp.nn, {name}"):
                batch = {"input_ids": ids, "labels": ids}
                batch |= {} if mask is None else {"attention_mask": mask}

                def work(batch: dict[str, Tensor] = batch) -> None:
                    step(batch)

                seen = names_of(work, figures.device.is_cuda)
                backend = backend_of(seen, figures.device.is_cuda)
                seconds = figures.device.seconds(work, sizes.repeats)
                figures.add(
                    f"smp.nn, a layer and its ends, {name}: forward and backward",
                    seconds * 1e3,
                    "ms",
                    note=backend,
                    backend=backend,
                )


def body(figures: Figures) -> None:
    sizes = TINY if figures.device.is_dry else Sizes()
    functions(figures, sizes)
    figures.device.free()
    with figures.measuring("smp.nn"):
        layers(figures, sizes)
