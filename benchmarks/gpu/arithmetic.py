"""Operations and bytes of a GPT-J. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

#: A parameter in mixed precision: 16-bit value; in float32 master, gradient and two moments.
STATE_BYTES = 18
#: The same without a 16-bit copy: `torch.autocast` over float32 parameters.
AUTOCAST_STATE_BYTES = 16
#: Share of a device's memory that a model may take. Others: libraries, fragments, temporaries.
USED = 0.9


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT-J."""

    layers: int = 28
    hidden: int = 4096
    heads: int = 16
    rotary: int = 64
    vocab: int = 50400
    seq: int = 2048

    @property
    def layer_parameters(self) -> int:
        """Attention 4 h^2 without biases, the MLP 8 h^2 with 5 h of them, a norm 2 h."""
        return 12 * self.hidden**2 + 7 * self.hidden

    @property
    def parameters(self) -> int:
        """Table, layers, last norm, head with bias."""
        ends = 2 * self.vocab * self.hidden + self.vocab + 2 * self.hidden
        return self.layers * self.layer_parameters + ends

    @property
    def matmul_parameters(self) -> int:
        """Number of parameters that every token is multiplied by; a table is only looked up."""
        return self.layers * 12 * self.hidden**2 + self.vocab * self.hidden


def flops_per_token(shape: Shape) -> float:
    """Counts forward and backward: 6 per parameter in a product, and attention below the diagonal.

    Scores and their product with the values take ``4 s h`` per layer and token in forward, half of
    that under a causal mask, and twice as much again in backward. Recomputation does not count.
    """
    return 6.0 * shape.matmul_parameters + 6.0 * shape.layers * shape.seq * shape.hidden


def layer_bytes(shape: Shape, microbatch: int) -> int:
    """Returns the bytes that a layer keeps for its backward: 16 bits, no dropout, fused attention.

    A token keeps these multiples of ``h`` numbers: input 1, norm 1, queries, keys and values 3,
    attention 1, the MLP before and after its activation 4 each.
    """
    return 14 * 2 * shape.hidden * shape.seq * microbatch


def activation_bytes(shape: Shape, microbatch: int, recompute: bool) -> int:
    """Kept for the backward of one microbatch, at most.

    Logits and their gradient in 16 bits, and all that the layers keep: everything, or with
    recomputation their inputs and everything of one.
    """
    tokens = shape.seq * microbatch
    logits = 2 * 2 * shape.vocab * tokens
    if not recompute:
        return logits + shape.layers * layer_bytes(shape, microbatch)
    return logits + shape.layers * 2 * shape.hidden * tokens + layer_bytes(shape, microbatch)


def peak_bytes(shape: Shape, microbatch: int, recompute: bool, state: int = STATE_BYTES) -> int:
    """Adds up parameters, gradients, optimizer state and the activations of one microbatch."""
    return state * shape.parameters + activation_bytes(shape, microbatch, recompute)


def fitting(shape: Shape, microbatch: int, recompute: bool, memory_bytes: int) -> Shape:
    """The shape with as many layers, at most its own, as fit into `USED` of a memory.

    Raises:
        ValueError: not even one fits.
    """
    for layers in range(shape.layers, 0, -1):
        smaller = replace(shape, layers=layers)
        if peak_bytes(smaller, microbatch, recompute) <= USED * memory_bytes:
            return smaller
    raise ValueError(f"no layer of {shape} fits into {memory_bytes} bytes")


def layers_share(shape: Shape) -> float:
    """Share of the layers in the operations of a token; the head has the others."""
    layer = flops_per_token(replace(shape, vocab=0))
    return layer / flops_per_token(shape)


def mfu(tokens_per_s: float, shape: Shape, flops_per_s: float) -> float:
    """Share of a rate of operations that the model's own operations make up."""
    return tokens_per_s * flops_per_token(shape) / flops_per_s
