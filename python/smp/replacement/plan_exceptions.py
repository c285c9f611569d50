"""Where plans of transformers do not fit the code of their models (found by ``tests/zoo``)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from smp.replacement import plans

#: By ``model_type``: parts, relative to the model, that stay whole, and why.
UNFIT: Mapping[str, Mapping[str, str]] = {
    "doge": {
        "layers.*.self_attn": "what dt_proj gives has to be split by heads, and the plan sums it",
    },
    "esmc": {
        "layers.*.self_attn": "it norms queries and keys over all heads together",
    },
    "neomme": {
        "layers.*.self_attn": "it has numbers and values of all heads that the plan does not name",
    },
    "gemma3n_text": {
        "layers.*.mlp": "it looks at the mean and deviation of all features together",
    },
}
#: Modules between a column and its row, by the last part of their name: parameters of theirs are
#: applied to what is split, whether a plan says so or not.
ACTIVATIONS = frozenset({"act", "act_fn", "activation", "activation_fn"})


def unfit_parts(root: nn.Module) -> dict[nn.Module, str]:
    """Parts of a model, and of models inside of it, that its plan cannot be for, and why."""
    found: dict[nn.Module, str] = {}
    for module in root.modules():
        known = UNFIT.get(str(getattr(getattr(module, "config", None), "model_type", "")))
        if known is None:
            continue
        parts = dict(module.named_modules())
        for path, key in plans.match({key: key for key in known}, parts).words.items():
            found[parts[path]] = known[key]
    return found
