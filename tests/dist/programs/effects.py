"""The builder's model of values: which registers share memory, and what a call does."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Group:
    """Registers that share memory."""

    saved: bool = False  # some operation needs the value as it is now
    fixed: bool = False  # not to be changed: a parameter, or memory shared over a boundary
    mutated: bool = False
    objects: set[int] = field(default_factory=set)  # distinct tensors


@dataclass(frozen=True)
class Leaf:
    """Describes one leaf of a result to the caller."""

    kind: str
    group: int  # equal for leaves that share memory
    object: int  # equal for leaves that are one tensor
    same_as_input: int | None  # the leaf is this very argument
    views_input: int | None  # it shares memory with this argument
    saved: bool
    fixed: bool


@dataclass(frozen=True)
class Summary:
    """Describes a block to its callers."""

    kinds: tuple[str, ...]
    saves: tuple[bool, ...]  # the callee may need the argument's value in its backward
    mutates: tuple[bool, ...]
    leaves: tuple[Leaf, ...]
    depth: int

    def first_tensor(self) -> int:
        return next(i for i, leaf in enumerate(self.leaves) if leaf.kind == "t")

    def usable_in_control_flow(self) -> bool:
        """Changes no argument and takes tensors and parameters only."""
        return not any(self.mutates) and self.kinds[0] == "t" and set(self.kinds) <= {"t", "p"}

    def usable_on_some_rows(self) -> bool:
        return self.usable_in_control_flow() and self.kinds.count("t") == 1


class Bookkeeping:
    """Registers of the block that is being built."""

    def __init__(self) -> None:
        self._kinds: list[str] = []
        self._group_of: list[int] = []
        self._object_of: list[int] = []
        self._groups: list[Group] = []
        self._num_objects = 0
        self._unread: list[int] = []  # tensors that no instruction has read

    def _put(self, kind: str, saved: bool = False, fixed: bool = False) -> int:
        """A register with memory of its own."""
        self._groups.append(Group(saved=saved, fixed=fixed))
        return self._share(kind, len(self._groups) - 1)

    def _share(self, kind: str, group: int, object_: int | None = None) -> int:
        if object_ is None:
            object_ = self._num_objects
            self._num_objects += 1
        self._kinds.append(kind)
        self._group_of.append(group)
        self._object_of.append(object_)
        self._groups[group].objects.add(object_)
        if kind == "t":
            self._unread.append(len(self._kinds) - 1)
        return len(self._kinds) - 1

    def _group(self, register: int) -> Group:
        return self._groups[self._group_of[register]]

    def _saves(self, *registers: int) -> None:
        for register in registers:
            self._group(register).saved = True

    def _can_change(self, register: int) -> bool:
        group = self._group(register)
        return self._kinds[register] == "t" and not group.saved and not group.fixed
