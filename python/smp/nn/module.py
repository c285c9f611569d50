"""The base class of modules that are split over the ranks of a tensor-parallel group."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

import smp._C as _C
from smp.modules.watching import unwatched
from smp.nn.layout import Layout
from smp.tensor_parallel import reading, regions
from smp.world.log import first_rank_log

Own = TypeVar("Own", bound="DistributedModule")


class DistributedModule(nn.Module):
    """A module that replaces another one and is split over ranks.

    Derive from it to register a distributed form of a module of your own (see ``smp.tp_register``).
    ``__init__`` takes sizes of the whole module and raises :class:`Unsupported` where they cannot
    be split; the original module is kept then.
    """

    _smp_took_place: tuple[str, str] | None = None
    _smp_name: str = ""  # in the model; empty for a module that another distributed one made

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "forward" in cls.__dict__:
            cls.forward = _named(cls.forward)  # type: ignore[method-assign]

    def took_place_of(self, original: nn.Module, name: str) -> None:
        """Records that it has replaced a plain module.

        Args:
            original: the plain module.
            name: name of both in the model.
        """
        self.__dict__["_smp_name"] = name or "(root)"
        self.__dict__["_smp_took_place"] = (type(original).__name__, self._smp_name)

    def apply(self: Own, fn: Callable[[nn.Module], None]) -> Own:
        """Calls a function with the modules in here, and says once that one has another class."""
        if self._smp_took_place is not None and first_rank_log.is_new(DistributedModule.apply):
            cls, place = self._smp_took_place
            first_rank_log.warning(
                "smp: apply() meets '%s', which was a %s before the model was wrapped and is a %s "
                "now, with slices of its weights. A function that asks for the class %s passes it "
                "over: initialise weights before smp.DistributedModel, or load a state dict",
                place,
                cls,
                type(self).__name__,
                cls,
            )
        return super().apply(fn)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if self._smp_took_place is None or name.startswith("__"):
                raise
            cls, place = self._smp_took_place
            raise AttributeError(
                f"{error}. {_C.rank_prefix()}It has taken the place of a {cls} ('{place}') when "
                "the model was wrapped; code that needs this of the original leaves it whole by "
                "smp.set_tensor_parallelism(module, False)"
            ) from None


def _named(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a forward so that its regions carry the name of the module."""

    @functools.wraps(forward)
    def run(self: DistributedModule, *args: Any, **kwargs: Any) -> Any:
        with unwatched():  # a script may call it by itself
            if not self._smp_name:
                return forward(self, *args, **kwargs)
            return regions.in_layer(self._smp_name, forward, self, *args, **kwargs)

    return run


_in_front: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


def class_in_front(front: type[nn.Module], cls: type[nn.Module]) -> type[nn.Module]:
    """Returns the class of modules of a class that another class precedes.

    Args:
        front: class whose forward runs that of ``cls`` by ``super().forward``.
        cls: class of the user's module.
    """
    if issubclass(cls, front):
        return cls
    if (front, cls) not in _in_front:
        members = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
        _in_front[front, cls] = type(cls.__name__, (front, cls), members)
    return _in_front[front, cls]


class IndivisibleModule(DistributedModule):
    """A distributed module that reads the parameters of its children.

    The partitioner gives its whole subtree to one pipeline rank.
    """

    is_indivisible = True


class ReadAsWhole(DistributedModule):
    """A module with a weight split along one dim, which code outside of it reads whole.

    Such code was written for the module that this one replaced. A module that was made as a
    distributed one returns this rank's part to all code.
    """

    _smp_split: reading.Split | None = None
    _split_dim = 1
    _sizes: list[int]
    _layout: Layout

    def took_place_of(self, original: nn.Module, name: str) -> None:
        super().took_place_of(original, name)
        # A user's subclass has a forward of its own, which reads the part.
        if len(self._sizes) > 1 and type(self).__module__.startswith("smp."):
            weight = f"{name}.weight" if name else "weight"
            self.__dict__["_smp_split"] = reading.Split(
                weight, self._split_dim, tuple(self._sizes), self._layout.has_own_batches
            )

    def __getattr__(self, name: str) -> Any:
        value: Any = super().__getattr__(name)
        if name == "weight" and self._smp_split is not None and reading.is_outside():
            return reading.whole(value, self._smp_split)
        return value
