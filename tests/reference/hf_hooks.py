"""Results of the hooks of Hugging Face families. Used after ``smp.init`` only."""

from __future__ import annotations

import importlib
from typing import Any

from smp.nn import huggingface
from smp.nn.huggingface.family import Kind
from smp.tensor_parallel import registry
from smp.tensor_parallel.registry import Declined, Registration
from tests.reference import hugging_face as hf

GPTS = ["gpt2", "gptj", "gptneo", "gptneox"]
ENCODERS = ["bert", "roberta"]
NAMES = [*GPTS, *ENCODERS]


def registration(name: str, kind: Kind | None = None) -> Registration:
    family = hf.family(name)
    family.build()  # imports what is registered
    huggingface.register_available()
    spec = family.translators.FAMILY
    modeling = importlib.import_module(spec.modeling)
    wanted: Kind = kind or ("stack" if family.is_encoder else "head")
    return registry._registrations[getattr(modeling, spec.classes[wanted])]


def options(
    name: str, kind: Kind | None = None, /, number: int | None = None, **changes: Any
) -> Any:
    """Returns the hook's arguments from a configuration, or its reason to decline."""
    hook = registration(name, kind).init_hook
    assert hook is not None
    config = hf.family(name).config(**changes)
    result = hook(config) if number is None else hook(config, number)
    if isinstance(result, Declined):
        return result
    assert result is not None
    args, kwargs = result
    assert tuple(args) == ()
    return dict(kwargs)


def reason(name: str, config: Any, kind: Kind | None = None) -> str:
    hook = registration(name, kind).init_hook
    assert hook is not None
    result = hook(config)
    assert isinstance(result, Declined), result
    return result.reason


def edited(name: str, **changes: Any) -> Any:
    """A configuration that was changed after it was made, as scripts do."""
    config = hf.family(name).config()
    for key, value in changes.items():
        setattr(config, key, value)
    return config


def new_fields(name: str) -> bool:
    """Returns whether the installed release has the fields of releases since 5."""
    return hasattr(hf.family(name).config(), "rope_parameters")
