"""Plans of ours for models of transformers that have none.

They name the parts of encoders, decoders and vision models, in the releases of transformers that
are tested; a name that a release does not have matches nothing. Tables and heads stay whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from smp.replacement.plans import COLUMN, ROW, Plan


def _paths(word: str, prefix: str, names: Iterable[str]) -> dict[str, str]:
    return {f"{prefix}.{name}": word for name in names}


def _t5(attention: str) -> Plan:
    """Returns the plan of one kind of attention of a stack of T5, with its table of biases."""
    return {
        **_paths(COLUMN, attention, "qkv"),
        f"{attention}.o": ROW,
        f"{attention}.relative_attention_bias.weight": ROW,
    }


_T5: Plan = {
    **_t5("block.*.layer.*.SelfAttention"),
    **_t5("block.*.layer.*.EncDecAttention"),
    **_paths(COLUMN, "block.*.layer.*.DenseReluDense", ("wi", "wi_0", "wi_1")),
    "block.*.layer.*.DenseReluDense.wo": ROW,
}
_VIT: Plan = {
    **_paths(COLUMN, "layers.*.attention", ("q_proj", "k_proj", "v_proj")),
    "layers.*.attention.o_proj": ROW,
    "layers.*.mlp.fc1": COLUMN,
    "layers.*.mlp.fc2": ROW,
}
_DINO: Plan = {path.replace("layers", "layer"): word for path, word in _VIT.items()}

#: Plans by name of the class.
PLANS: Mapping[str, Plan] = {
    **dict.fromkeys(("T5Stack", "MT5Stack", "UMT5Stack"), _T5),
    **dict.fromkeys(("ViTModel", "DeiTModel"), _VIT),
    "Dinov2Encoder": _DINO,
}
