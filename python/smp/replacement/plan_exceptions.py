"""Lists where plans of transformers do not fit the code of their models (see ``tests/zoo``)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from smp.replacement import plans

#: Parts that stay whole, with the reason, by ``model_type``; paths are relative to the model.
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
#: Last parts of the names of modules between a column and its row. Their parameters are applied
#: to split features, even if the plan does not name them.
ACTIVATIONS = frozenset({"act", "act_fn", "activation", "activation_fn"})


def unfit_parts(root: nn.Module) -> dict[nn.Module, str]:
    """Returns the parts of a model, and of models inside, that its plan does not fit, and why."""
    found: dict[nn.Module, str] = {}
    for module in root.modules():
        known = UNFIT.get(str(getattr(getattr(module, "config", None), "model_type", "")))
        if known is None:
            continue
        parts = dict(module.named_modules())
        for path, key in plans.match({key: key for key in known}, parts).words.items():
            found[parts[path]] = known[key]
    return found
