"""Decides in which order one matrix of a user's plan makes queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from smp.nn.planned.order_trial import OrderTrial, whole_numbers
from smp.nn.planned.runs import CannotTry
from smp.replacement import plan_sizes, plans
from smp.replacement.plan_adapters import is_adapted
from smp.replacement.plan_cuts import SplitState, weight_dim
from smp.replacement.plan_fused import ORDERS, Form, Sizes, form_of, forms_of, likely_heads
from smp.replacement.plan_sizes import CannotCut, Heads

# Largest number of attributes with unknown names that a trial replaces together.
_MOST_GUESSED = 3


def find_form(
    state: SplitState, path: str, group: plans.Group, rows: Mapping[str, int], is_tried: bool
) -> Form | None:
    """Returns the form of the only column of a group if it makes queries, keys and values.

    Args:
        state: findings on the module, whose word for the column becomes that of its order.
        path: path of the group.
        group: column and rows.
        rows: number of input features of the rows, by path.
        is_tried: whether a trial finds the order.

    Returns:
        None if the column makes something else, or may do so and is not tried.

    Raises:
        CannotCut: nothing tells heads or order, or the word says what the sizes contradict.
    """
    words = {p: state.words[p] for p in group.columns}
    is_named = plans.QKV_COLUMN in words.values()
    if not is_named and set(words.values()) != {plans.COLUMN}:
        return None
    column = next(p for p in words if not is_named or words[p] == plans.QKV_COLUMN)
    sizes = Sizes(column, features_of(state, column, 0), rows, state.layout.num_ranks)
    numbers = numbers_of(state.modules[path])
    known = plan_sizes.heads_of(numbers, {}, sizes.width)
    heads = None if known is None else sizes.heads(known.queries)
    if len(words) > 1 or sizes.key_width == 0 or (known is not None and heads is None):
        if is_named:
            raise CannotCut(
                f"has {sizes.out} features in '{column}', which are not queries, keys and values "
                f"of all heads, or not the only ones beside what takes {sizes.width}"
            )
        return None
    reason = ""
    if is_tried:
        try:
            return _tried_form(state, path, sizes, heads, is_named)
        except CannotTry as error:
            reason = f"; a trial of '{path or type(state.root).__name__}' failed: {error}"
    if heads is not None:
        return _told_form(state, path, sizes, heads, is_named)
    if is_named:
        raise CannotCut(
            f"has '{column}', which is {plans.QKV_COLUMN}, and no attribute such as "
            f"{plan_sizes.QUERY_NAMES[0]} that tells the number of heads{reason}"
        )
    if is_tried:
        raise CannotCut(f"{_unclear(sizes)}{reason}")
    return None


def _told_form(
    state: SplitState, path: str, sizes: Sizes, heads: Heads, is_named: bool
) -> Form | None:
    """Returns the form that the word and the attributes tell."""
    numbers = numbers_of(state.modules[path])
    names = (*plan_sizes.KEY_VALUE_NAMES, *plan_sizes.GROUP_NAMES)
    if not is_named and (heads.keys == heads.queries or not any(numbers[n] for n in names)):
        return None
    form = form_of(sizes, heads, not is_named, whole_numbers(state.modules[path]))
    plan_sizes.check_groups(form.attributes, heads, form.shares)
    return form


def _tried_form(
    state: SplitState, path: str, sizes: Sizes, heads: Heads | None, is_named: bool
) -> Form:
    """Returns the form that fits the code.

    Raises:
        CannotCut: none fits, or both orders do.
        CannotTry: there is no trial.
    """
    owner = state.modules[path]
    for part in (sizes.column, *sizes.rows):
        if is_adapted(state.modules[part.rpartition(".")[0]]):
            raise CannotTry(f"'{part}' has adapters")
    for name in owner._parameters:
        if state.words.get(plans.join(path, name)) == plans.COLUMN:
            raise CannotTry(f"it has a parameter '{name}' that is split")
    inside = {part: part.removeprefix(f"{path}.") for part in (sizes.column, *sizes.rows)}
    trial = OrderTrial(owner, inside[sizes.column], [inside[row] for row in sizes.rows])
    queries = likely_heads(sizes, trial.numbers) if heads is None else [heads.queries]
    if not queries:
        raise CannotTry("it reads no attribute that may be a number or size of heads")
    orders = (False,) if is_named else (True, False)
    known = whole_numbers(owner)
    problems: dict[bool, str] = {}
    for num_guessed in range(_MOST_GUESSED + 1):
        fitting: dict[bool, Form] = {}
        for form in forms_of(sizes, queries, orders, known, trial.numbers, num_guessed):
            problem = None if form.by_head in fitting else _problem_of(trial, form, inside)
            if problem is None:
                fitting.setdefault(form.by_head, form)
            else:
                problems.setdefault(form.by_head, problem)
        if len(fitting) > 1:
            raise CannotCut(
                f"{_unclear(sizes)}: in a trial both orders fit, so that its features do not "
                f"matter there; if the order is {ORDERS[False]}, its word is {plans.QKV_COLUMN}"
            )
        for form in fitting.values():
            if not form.by_head:
                state.words[sizes.column] = plans.QKV_COLUMN
            return form
    told = "; ".join(f"{ORDERS[by_head]}: {problem}" for by_head, problem in problems.items())
    raise CannotCut(
        f"{_unclear(sizes)}: in a trial no known order of queries, keys and values fits the code "
        f"({told})"
    )


def _problem_of(trial: OrderTrial, form: Form, inside: Mapping[str, str]) -> str | None:
    """Returns why a form does not fit the code on some rank, or None."""
    sizes = {inside[row]: share.sizes for row, share in form.shares.rows.items()}
    every = torch.arange(form.unit * (form.heads.queries + 2 * form.heads.keys))
    for rank, units in enumerate(form.units):
        own = every.view(-1, form.unit)[list(units)].flatten()
        attributes = {name: by_rank[rank] for name, by_rank in form.attributes.items()}
        problem = trial.problem_of(rank, own, attributes, sizes)
        if problem is not None:
            return problem
    return None


def _unclear(sizes: Sizes) -> str:
    two = f" (two concatenated matrices are {plans.PACKED_COLUMN})"
    return (
        f"has {sizes.out} features in '{sizes.column}', and what they feed takes {sizes.width}: "
        f"which ones belong together cannot be told{two if sizes.out == 2 * sizes.width else ''}"
    )


def features_of(state: SplitState, path: str, dim: int) -> int:
    """Returns the number of output features (0) or input features (1) of a linear layer."""
    module = state.modules[path]
    return module.get_parameter("weight").shape[weight_dim(module, dim)]


def numbers_of(owner: nn.Module) -> dict[str, int]:
    """Returns the numbers of heads from the attributes of a module, or from its configuration."""
    names = (
        *plan_sizes.SIZE_NAMES,
        *plan_sizes.QUERY_NAMES,
        *plan_sizes.KEY_VALUE_NAMES,
        *plan_sizes.GROUP_NAMES,
    )
    own = {name: number_of(owner.__dict__.get(name)) for name in names}
    if any(own[name] for name in (*plan_sizes.SIZE_NAMES, *plan_sizes.QUERY_NAMES)):
        config = getattr(owner, "config", None)
        for name in names:
            if not own[name] and name not in plan_sizes.SIZE_NAMES:
                own[name] = number_of(getattr(config, name, None))
    return own


def number_of(value: Any) -> int:
    """Returns a whole number, or 0 for other values."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
