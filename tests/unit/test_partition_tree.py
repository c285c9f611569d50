"""The module tree that Python builds for the partitioner."""

from __future__ import annotations

import torch
from torch import nn

from smp.partition.tree import build_tree


class Twice(nn.Module):
    """A model with a block under two names, and with a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.first = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.second = self.first
        self.norm = nn.BatchNorm1d(4, affine=False)
        self.head = nn.Linear(4, 10)
        self.head.weight = self.embedding.weight


def test_nodes_are_distinct_modules_in_registration_order() -> None:
    model = Twice()
    index = build_tree(model)
    assert list(index.modules) == list(model.modules())
    assert [names[0] for names in index.names] == [name for name, _ in model.named_modules()]
    assert [index.tree.name(i) for i in range(len(index.tree))] == [n[0] for n in index.names]
    assert [index.tree.parent_idx(i) for i in range(len(index.tree))] == list(index.parents)
    assert index.parents == (-1, 0, 0, 2, 2, 0, 0)


def test_module_registered_twice_has_all_its_names() -> None:
    index = build_tree(Twice())
    assert index.names[2] == ("first", "second")
    assert index.names[3] == ("first.0", "second.0")
    assert index.names[0] == ("",)


def test_parameters_count_once_at_the_first_owner() -> None:
    model = Twice()
    index = build_tree(model)
    bytes_of = {index.names[i][0]: index.tree.param_bytes(i) for i in range(len(index.tree))}
    assert bytes_of == {
        "": 0,
        "embedding": 160,
        "first": 0,
        "first.0": 80,
        "first.1": 0,
        "norm": 0,
        "head": 40,  # the bias
    }
    assert index.tree.total_param_bytes == sum(p.nbytes for p in model.parameters())


def test_parameter_held_twice_by_one_module_counts_once() -> None:
    module = nn.Linear(4, 4)
    module.again = module.weight
    index = build_tree(module)
    assert index.tree.total_param_bytes == 80
    assert index.shared == ()


def test_shared_parameter_is_named_on_both_sides() -> None:
    (tie,) = build_tree(Twice()).shared
    assert (tie.owner_idx, tie.owner_name, tie.alias_idx, tie.alias_name) == (
        1,
        "weight",
        6,
        "weight",
    )


def test_state_below_a_node_is_known() -> None:
    index = build_tree(Twice())
    with_parameters = {index.names[i][0] for i in range(7) if index.has_parameters[i]}
    stateless = {index.names[i][0] for i in range(7) if index.is_stateless[i]}
    assert with_parameters == {"", "embedding", "first", "first.0", "head"}
    assert stateless == {"first.1"}, "a module with buffers has state"


def test_modules_that_read_their_childrens_parameters_stay_whole() -> None:
    model = nn.Sequential(nn.MultiheadAttention(4, 2), nn.Linear(4, 4))
    index = build_tree(model)
    names = [names[0] for names in index.names]
    assert names == ["", "0", "0.out_proj", "1"]
    assert index.anchors == (0, 1, 1, 3)


def test_parametrized_modules_stay_whole() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    index = build_tree(model)
    below = [i for i, names in enumerate(index.names) if names[0].startswith("0.")]
    assert below and all(index.anchors[i] == 1 for i in below)


def test_scripted_modules_stay_whole() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    index = build_tree(nn.Sequential(nn.Linear(4, 4), scripted))
    assert index.tree.total_param_bytes == 3 * 80
    assert index.anchors == (0, 1, 2, 2, 2)


def test_meta_parameters_have_bytes() -> None:
    with torch.device("meta"):
        index = build_tree(nn.Linear(1000, 1000, bias=False, dtype=torch.bfloat16))
    assert index.tree.total_param_bytes == 2_000_000
