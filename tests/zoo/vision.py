"""Models of torchvision and timm, one of each family, made small by rule.

A family is a module of the package. The model that its name, or what the package says about its
weights, makes the smallest is taken. `find_choice` tries arguments that the constructor takes
(picture size, depths), then what `shrinking` does to a model that was built, then larger pictures,
and keeps the first with which one process gets a loss and gradients.
"""

from __future__ import annotations

import functools
import inspect
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.catalogue import Entry
from tests.zoo.shrinking import (
    arguments_of,
    keep_few_of_equal_layers,
    narrow_classifiers,
    shallow,
    size_of,
    squares,
    without_randomness,
    without_values,
)
from tests.zoo.source import BATCH, CLASSES, Inputs, NoRecipe

LARGEST = 30_000_000  # parameters
PATIENCE_S = 25.0
SIDES = (64, 96, 128, 224, 256, 320)
FRAMES = 8
HEADS = 2
KEYPOINTS = 17
# Words in the names of small models, the smallest first.
_SMALL = (
    "test", "atto", "femto", "pico", "nano", "xxs", "xxt", "xs", "tiny", "mini", "t", "small", "s",
)  # fmt: skip
_DEPTHS = ("depth", "depths", "layers", "num_layers", "stage_depths", "num_blocks")


@dataclass(frozen=True)
class Choice:
    """A way to make a model small.

    Attributes:
        side: side of pictures in pixels.
        arguments: arguments of the constructor, besides the sizes that pictures ask for.
        shortened: whether only few of equal layers stay.
    """

    side: int = SIDES[0]
    arguments: tuple[tuple[str, Any], ...] = ()
    shortened: bool = True


# ---- which -----------------------------------------------------------------


def torchvision_entries() -> list[Entry]:
    """The smallest model of each module that makes models."""
    from torchvision.models import get_model_builder, get_model_weights, list_models

    sizes: dict[str, list[tuple[float, str]]] = {}
    for name in list_models():
        module = get_model_builder(name).__module__
        if ".quantization." in module:  # for inference
            continue
        weights = list(get_model_weights(name))
        size = min((w.meta["num_params"] for w in weights), default=0)
        sizes.setdefault(module, []).append((size, name))
    return [
        Entry("torchvision", module.removeprefix("torchvision.models."), module, min(found)[1])
        for module, found in sizes.items()
    ]


def timm_entries() -> list[Entry]:
    """The model of each module whose name promises the smallest."""
    from timm.models import list_models, list_modules

    entries = []
    for family in list_modules():
        names = list_models(module=family)
        if names:
            entries.append(
                Entry("timm", family, f"timm.models.{family}", min(names, key=_size_by_name))
            )
    return entries


def _size_by_name(name: str) -> tuple[int, int, str]:
    words = re.split(r"[_\d]+", name)
    rank = next((i for i, word in enumerate(_SMALL) if word in words), len(_SMALL))
    numbers = [int(number) for number in re.findall(r"\d+", name)]
    return rank, sum(numbers), name


# ---- how it is built -------------------------------------------------------


def _create(entry: Entry, arguments: dict[str, Any]) -> nn.Module:
    if entry.source == "timm":
        import timm

        model: nn.Module = timm.create_model(entry.name, pretrained=False, **arguments)
        return model
    return entry.load()(weights=None, **arguments)  # type: ignore[no-any-return]


@functools.cache
def _arguments(entry: Entry) -> dict[str, Any]:
    return arguments_of(lambda: _create(entry, _fixed(entry)))


def _fixed(entry: Entry) -> dict[str, Any]:
    """Returns the arguments that do not depend on the size: no weights, few classes."""
    if entry.source == "timm":
        return {"num_classes": CLASSES}
    taken = inspect.signature(entry.load()).parameters
    result: dict[str, Any] = {"weights_backbone": None} if "weights_backbone" in taken else {}
    return result | {"num_classes": CLASSES} if "optical" not in entry.module else result


def _of_size(entry: Entry, side: int) -> dict[str, Any]:
    """Returns the constructor's arguments about pictures, and about chance."""
    taken = _arguments(entry)
    result: dict[str, Any] = {}
    for name in taken:
        if name in ("img_size", "image_size", "input_size"):
            pair = isinstance(taken[name], (list, tuple))
            result[name] = (side, side) if pair else side
        elif name in ("min_size", "max_size"):
            result[name] = side
        elif name.endswith("batch_size_per_image"):  # all of them: nothing is drawn
            result[name] = 1_000_000
        elif name == "init_weights":
            result[name] = False
    return result


def build(entry: Entry, choice: Choice) -> nn.Module:
    arguments = _fixed(entry) | _of_size(entry, choice.side) | dict(choice.arguments)
    model = _create(entry, arguments)
    if choice.shortened:
        keep_few_of_equal_layers(model)
    narrow_classifiers(model)
    without_randomness(model)
    return model


def choices(entry: Entry) -> Iterator[Choice]:
    """The smallest first."""
    try:
        given = _arguments(entry)
    except Exception:  # builders raise what they like
        given = {}
    depths = tuple((name, shallow(given[name])) for name in _DEPTHS if given.get(name) is not None)
    narrow = depths
    width, heads = given.get("embed_dim"), given.get("num_heads")
    if type(width) is int and type(heads) is int and width % heads == 0 and heads > HEADS:
        narrow = (*depths, ("embed_dim", width // heads * HEADS), ("num_heads", HEADS))
    ways = [narrow, depths, ()]
    for arguments in [way for i, way in enumerate(ways) if way not in ways[:i]]:
        for shortened in (True, False):
            for side in SIDES:
                yield Choice(side, arguments, shortened)


# ---- how it is fed ---------------------------------------------------------


@dataclass(frozen=True)
class VisionRecipe:
    """Random pictures, of the form that the family takes.

    Attributes:
        choice: choice that holds their size.
        kind: "pictures", "videos", "pairs" or "boxes".
        num_samples: number of samples in a microbatch.
    """

    choice: Choice
    kind: str = "pictures"
    num_samples: int = BATCH

    def inputs(self, model: nn.Module, dtype: torch.dtype, seed: int) -> Inputs:
        """Makes one microbatch."""
        generator = torch.Generator().manual_seed(seed)
        side = self.choice.side

        def real(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        names = list(inspect.signature(model.forward).parameters)
        if self.kind == "videos":
            return {names[0]: real(BATCH, 3, FRAMES, side, side)}
        if self.kind == "pairs":
            pair = {name: real(BATCH, 3, side, side) for name in names[:2]}
            return pair | {"num_flow_updates": 2}
        if self.kind == "boxes":
            pictures = [real(3, side, side) for _ in range(self.num_samples)]
            return {names[0]: pictures, names[1]: [_boxes(side, dtype) for _ in pictures]}
        return {names[0]: real(BATCH, 3, side, side)}

    def loss(self, output: Any, everything: bool) -> Tensor:
        return squares(output)


def _boxes(side: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Two objects in one picture."""
    corners = torch.tensor([[0.1, 0.2, 0.6, 0.7], [0.4, 0.1, 0.9, 0.8]], dtype=dtype)
    masks = torch.zeros(2, side, side, dtype=torch.uint8)
    masks[0, side // 5 : side // 2, side // 8 : side // 2] = 1
    masks[1, side // 8 : side // 2, side // 2 :] = 1
    places = torch.linspace(0.45, 0.55, KEYPOINTS, dtype=dtype) * side
    keypoints = torch.stack([places, places, torch.ones_like(places)], dim=-1)
    return {
        "boxes": corners * side,
        "labels": torch.tensor([1, 1]),
        "masks": masks,
        "keypoints": keypoints.expand(2, -1, -1).clone(),
    }


_KINDS = {".video.": "videos", ".optical_flow.": "pairs", ".detection.": "boxes"}


def _kind(entry: Entry) -> str:
    for part, kind in _KINDS.items():
        if part in entry.module:
            return kind
    return "pictures"


def _num_samples(entry: Entry) -> int:
    """Returns 1 if a detector enlarges small pictures whatever its arguments are, else `BATCH`.

    SSD computes with 300 x 300 and all channels of VGG16: on one core in float64 some 8 s for the
    forward and backward of a picture.
    """
    is_fixed = _kind(entry) == "boxes" and "min_size" not in _arguments(entry)
    return 1 if is_fixed else BATCH


# ---- the search ------------------------------------------------------------


def candidates(entry: Entry) -> Iterator[VisionRecipe]:
    """Ways to make and feed a model; the first that fits is taken.

    Raises:
        NoRecipe: none is small, or time is over.
    """
    start = time.monotonic()
    smallest, reason = None, "no arguments make a model"
    too_large: list[Any] = []
    for choice in choices(entry):
        if time.monotonic() - start > PATIENCE_S:
            break
        form = (choice.arguments, choice.shortened)
        if form in too_large:
            continue
        try:
            size = size_of(without_values(functools.partial(build, entry, choice)))
        except Exception as error:  # the constructor does not take these sizes
            reason = f"{type(error).__name__}: {str(error)[:200]}"
            continue
        smallest = size if smallest is None else min(size, smallest)
        if size > LARGEST:
            too_large.append(form)
            continue
        yield VisionRecipe(choice, _kind(entry), _num_samples(entry))
    if smallest is None or smallest > LARGEST:
        raise NoRecipe(reason if smallest is None else f"not tiny: {smallest} parameters")
