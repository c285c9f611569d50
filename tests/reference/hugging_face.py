"""Tiny Hugging Face models of the families that have a distributed form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from tests.reference.models import randomise_

VOCABULARY = 43
LAYERS = 3
HIDDEN = 24
HEADS = 4
INTERMEDIATE = 40
POSITIONS = 16

_TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
_GPT = {"n_positions": POSITIONS, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS}
_WIDE = {
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "max_position_embeddings": POSITIONS,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}


@dataclass(frozen=True)
class Family:
    """A family's places in smp and transformers, and sizes for its configuration.

    Attributes:
        name: name of our module in ``smp.nn.huggingface``.
        classes: prefix of transformers' classes.
        head: class with a language-modelling head.
        sizes: arguments of the configuration.
        dropouts: fields of the configuration that are probabilities of dropout.
    """

    name: str
    classes: str
    head: str
    sizes: Mapping[str, Any]
    dropouts: tuple[str, ...]

    @property
    def is_encoder(self) -> bool:
        return self.name in ("bert", "roberta")

    @property
    def layer(self) -> str:
        """Class of a layer."""
        rest = {"gptneox": "Layer", "bert": "Layer", "roberta": "Layer"}
        return self.classes + rest.get(self.name, "Block")

    @property
    def translators(self) -> ModuleType:
        from smp.nn import huggingface

        module: ModuleType = getattr(huggingface, self.name)
        return module

    def to_hf(self, state_dict: Mapping[str, Any], **arguments: Any) -> dict[str, Tensor]:
        translate = getattr(self.translators, f"translate_state_dict_to_hf_{self.name}")
        result: dict[str, Tensor] = translate(state_dict, **arguments)
        return result

    def to_smp(self, state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
        name = f"translate_hf_state_dict_to_smdistributed_{self.name}"
        result: dict[str, Tensor] = getattr(self.translators, name)(state_dict)
        return result

    def config(self, **changes: Any) -> Any:
        """Makes a configuration without dropout and cache, unless changed."""
        import transformers

        quiet: dict[str, Any] = dict.fromkeys(self.dropouts, 0.0)
        config_class = getattr(transformers, f"{self.classes}Config")
        return config_class(**{**_TOKENS, **self.sizes, **quiet, "use_cache": False, **changes})

    def build(self, kind: str = "head", seed: int = 7, **changes: Any) -> nn.Module:
        """A model with every parameter randomised.

        Args:
            kind: "head", "base", or the rest of a class name after the family's.
            seed: seed of the parameters.
            changes: changed fields of the configuration.
        """
        import transformers

        suffix = {"head": self.head, "base": "Model"}.get(kind, kind)
        model: nn.Module = getattr(transformers, self.classes + suffix)(self.config(**changes))
        return randomise_(model.eval(), seed)


_BERT = {**_WIDE, "num_labels": 3}
_BERT_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
FAMILIES = {
    family.name: family
    for family in (
        Family("gpt2", "GPT2", "LMHeadModel", _GPT, ("resid_pdrop", "embd_pdrop", "attn_pdrop")),
        Family(
            "gptj", "GPTJ", "ForCausalLM", {**_GPT, "rotary_dim": 4, "n_inner": INTERMEDIATE},
            ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        ),
        Family(
            "gptneo", "GPTNeo", "ForCausalLM",
            {
                "hidden_size": HIDDEN, "num_layers": LAYERS, "num_heads": HEADS, "window_size": 3,
                "attention_types": [[["global", "local", "global"], 1]],
                "max_position_embeddings": POSITIONS,
            },
            ("resid_dropout", "embed_dropout", "attention_dropout"),
        ),
        Family(
            "gptneox", "GPTNeoX", "ForCausalLM", {**_WIDE, "rotary_pct": 0.4},
            ("hidden_dropout", "attention_dropout"),
        ),
        Family("bert", "Bert", "ForMaskedLM", _BERT, _BERT_DROPOUTS),
        Family("roberta", "Roberta", "ForMaskedLM", {**_BERT, "pad_token_id": 1}, _BERT_DROPOUTS),
    )
}  # fmt: skip


def is_older() -> bool:
    import transformers

    return str(transformers.__version__).startswith("4.30.")


def family(name: str) -> Family:
    """The family of a name."""
    return FAMILIES[name]
