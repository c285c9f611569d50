"""Which kernel attention takes, as functions of what is known without looking at a value."""

from __future__ import annotations

import torch

#: Channels of a head in PyTorch's flash kernels, at most.
_FLASH_HEAD_SIZE = 256
_HALVES = (torch.float16, torch.bfloat16)


def beyond_fused(window: int | None, has_slopes: bool, prescale: float) -> list[str]:
    """What PyTorch's fused kernel cannot do, named as the arguments of layers.

    Args:
        window, prescale: as in `smp.nn.attend.Scoring`.
        has_slopes: with ALiBi.
    """
    needed = {
        "window_size": window is not None,
        "use_alibi": has_slopes,
        "query_key_layer_scaling": prescale != 1.0,
    }
    return [name for name, is_needed in needed.items() if is_needed]


def has_fp32_scores(device_type: str, dtype: torch.dtype, reduces_in_16_bits: bool) -> bool:
    """Has ``scaled_dot_product_attention`` products, softmax and sums in float32 at least?

    On CUDA all of its kernels have, for 16-bit inputs too: cuDNN, flash and the memory-efficient
    one add products up in float32, keep scores there and round probabilities only, as a softmax in
    float32 does whose result is cast; the plain one computes in float32 unless it is told not to.
    The kernel of the CPU has such scores, but adds up gradients of keys and values in 16 bits,
    which makes them three times less precise.

    Args:
        device_type: of the inputs.
        dtype: of the inputs.
        reduces_in_16_bits: ``torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp`` was set.
    """
    if dtype not in _HALVES:
        return True
    return device_type == "cuda" and not reduces_in_16_bits


def takes_fused(
    device_type: str,
    dtype: torch.dtype,
    *,
    in_fp32: bool,
    drops: bool,
    reduces_in_16_bits: bool,
) -> bool:
    """Does ``scaled_dot_product_attention`` compute what is asked for, in no more memory?

    It does so with a mask and without, and whether it is causal or not.

    Args:
        device_type, dtype, reduces_in_16_bits: as in `has_fp32_scores`.
        in_fp32: scores and softmax have to be in float32 at least.
        drops: some of the probabilities are dropped; that of the CPU would keep all of them.
    """
    if in_fp32 and not has_fp32_scores(device_type, dtype, reduces_in_16_bits):
        return False
    return not drops or device_type == "cuda"


def keeps_groups(
    device_type: str, dtype: torch.dtype, *, has_mask: bool, head_size: int, flash_works: bool
) -> bool:
    """May key-value heads stay fewer than those of queries (``enable_gqa``)?

    Flash and cuDNN read each of them for its group. The memory-efficient kernel, which is the one
    for masks and float32, cannot, and PyTorch would fall back to whole matrices of scores: then
    repeated heads are cheaper. On the CPU repeating costs no time that could be measured, and
    kernels of older releases cannot read groups.

    Args:
        device_type, dtype: of the inputs.
        has_mask: there is a tensor of masks.
        head_size: channels of a head.
        flash_works: PyTorch says that its flash kernel takes these inputs; counts on CUDA.
    """
    return (
        device_type == "cuda"
        and dtype in _HALVES
        and not has_mask
        and head_size <= _FLASH_HEAD_SIZE
        and flash_works
    )
