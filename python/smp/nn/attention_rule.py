"""Rules that choose the kernel of attention from shapes, dtypes and options alone."""

from __future__ import annotations

import torch

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
