"""Rules that choose the kernel of attention from shapes, dtypes and options alone."""

from __future__ import annotations

import torch

#: largest number of channels of a head in PyTorch's flash kernels
_FLASH_HEAD_SIZE = 256
_HALVES = (torch.float16, torch.bfloat16)


def beyond_fused(window: int | None, has_slopes: bool, prescale: float) -> list[str]:
    """Returns the arguments of layers that PyTorch's fused kernel does not support.

    Args:
        window, prescale: the same as in `smp.nn.attend.Scoring`.
        has_slopes: the layer uses ALiBi.
    """
    needed = {
        "window_size": window is not None,
        "use_alibi": has_slopes,
        "query_key_layer_scaling": prescale != 1.0,
    }
    return [name for name, is_needed in needed.items() if is_needed]


def has_fp32_scores(device_type: str, dtype: torch.dtype, reduces_in_16_bits: bool) -> bool:
    """Returns whether ``scaled_dot_product_attention`` computes in float32 at least.

    On CUDA all of its kernels do so for products, softmax and sums, also of 16-bit inputs. The
    cuDNN, flash and memory-efficient kernels add products up in float32, keep scores in it and
    round only probabilities, like a softmax in float32 whose result is cast. The plain kernel
    computes in float32 unless ``reduces_in_16_bits``. The CPU's kernel has scores in float32, but
    adds up gradients of keys and values in 16 bits, which makes them three times less precise.

    Args:
        device_type: type of the inputs' device.
        dtype: dtype of the inputs.
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
    """Returns whether ``scaled_dot_product_attention`` can replace our softmax in no more memory.

    The answer is the same with and without a mask, causal or not.

    Args:
        device_type, dtype, reduces_in_16_bits: the same as in `has_fp32_scores`.
        in_fp32: scores and softmax have to be in float32 at least.
        drops: probabilities are dropped; the CPU's kernel holds all of them in memory then.
    """
    if in_fp32 and not has_fp32_scores(device_type, dtype, reduces_in_16_bits):
        return False
    return not drops or device_type == "cuda"


def keeps_groups(
    device_type: str, dtype: torch.dtype, *, has_mask: bool, head_size: int, flash_works: bool
) -> bool:
    """Returns whether key-value heads may stay fewer than query heads (``enable_gqa``).

    Flash and cuDNN read each key-value head for its group of query heads. The memory-efficient
    kernel, which serves masks and float32, cannot, and PyTorch would fall back to whole matrices of
    scores; repeated heads are cheaper than that. On the CPU repeating costs no measurable time, and
    kernels of older releases cannot read groups.

    Args:
        device_type, dtype: device type and dtype of the inputs.
        has_mask: the call has a mask tensor.
        head_size: channels of a head.
        flash_works: PyTorch's flash kernel takes these inputs; counts on CUDA.
    """
    return (
        device_type == "cuda"
        and dtype in _HALVES
        and not has_mask
        and head_size <= _FLASH_HEAD_SIZE
        and flash_works
    )
