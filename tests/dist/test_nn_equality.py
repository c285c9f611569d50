"""Split modules compute what one process computes on the samples of the whole group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smp.initial.initialise import initialise_delayed
from tests.dist.pool import Pool
from tests.reference.split_modules import CASES, MODES, Case, compare, float64, num_bytes

MODE_NAMES = [f"{'prescaled' if p else 'own_batch'}-{o}" for p, o in MODES]


def init(degree: int, prescaled: bool, optimize: str) -> None:
    import smp

    config = {"tensor_parallel_degree": degree, "ddp": True}
    smp.init(config | {"prescaled_batch": prescaled, "optimize": optimize})


def compare_all(
    rank: int, degree: int, prescaled: bool, optimize: str, cases: list[Case]
) -> list[tuple[int, int]]:
    init(degree, prescaled, optimize)
    return [compare(case, rank, degree, prescaled) for case in cases]


@pytest.mark.sample(keep=2)
@pytest.mark.parametrize(("prescaled", "optimize"), MODES, ids=MODE_NAMES)
@pytest.mark.parametrize("degree", [2, 3, 4])
def test_split_modules_equal_one_process(
    pool: Pool, degree: int, prescaled: bool, optimize: str
) -> None:
    results = pool.run(degree, compare_all, degree, prescaled, optimize, list(CASES))
    for idx, case in enumerate(CASES):
        own = [held[idx][0] for held in results]
        whole = results[0][idx][1]
        assert max(own) < whole, f"{case}: a rank of {degree} holds everything"
        assert sum(own) >= whole, f"{case}: {own} bytes are held of {whole}"


# ---- bytes -----------------------------------------------------------------------------


def bytes_of_a_model(rank: int, degree: int, optimize: str) -> tuple[int, int]:
    import smp
    from smp.tensor_parallel import sharding

    init(degree, False, optimize)
    model = smp.nn.DistributedTransformerLMHead(
        num_layers=2,
        num_attention_heads=4,
        attention_head_size=16,
        hidden_size=64,
        intermediate_size=256,
        vocab_size=1000,
        num_positions=8,
    )
    whole = sum(
        torch.Size(sharding.whole_shape(p)).numel() * p.element_size() for p in model.parameters()
    )
    return num_bytes(model), whole


@pytest.mark.parametrize("degree", [2, 4])
def test_a_rank_holds_its_share_of_the_bytes(pool: Pool, degree: int) -> None:
    for own, whole in pool.run(degree, bytes_of_a_model, degree, "memory"):
        assert whole / degree <= own <= 1.1 * whole / degree


# ---- what cannot be split --------------------------------------------------------------


def refuse(rank: int, degree: int) -> list[str]:
    import smp

    init(degree, False, "memory")
    texts = []
    for make in (
        lambda: smp.nn.DistributedAttentionLayer(2, 4, 8),
        lambda: smp.nn.DistributedTransformerOutputLayer(8, 2),
        lambda: smp.nn.DistributedLinear(2, 8),
        lambda: smp.nn.DistributedEmbedding(8, 2),
        lambda: smp.nn.DistributedEmbedding(8, 8, max_norm=1.0),
        lambda: smp.nn.DistributedTransformerLMHead(1, 4, 4, 16, 16, vocab_size=2),
    ):
        with pytest.raises(smp.nn.Unsupported) as error:
            make()
        texts.append(str(error.value))
    return texts


def test_sizes_that_leave_a_rank_without_anything_are_refused(pool: Pool) -> None:
    for texts in pool.run(3, refuse, 3):
        words = ("num_attention_heads", "intermediate_size", "in_features")
        for word, text in zip(
            (*words, "embedding_dim", "max_norm", "vocab_size"), texts, strict=True
        ):
            assert word in text


# ---- initial values --------------------------------------------------------------------


def initial_values(rank: int, degree: int, delayed: bool) -> dict[str, tuple[Tensor, Any]]:
    import smp
    from smp.tensor_parallel import sharding

    init(degree, False, "memory")
    torch.manual_seed(11)
    with smp.delay_param_initialization(delayed):
        model = smp.nn.DistributedTransformerLMHead(2, 4, 4, 16, 32, 21, 8, residual_init_std=0.01)
    if delayed:
        assert all(p.is_meta for p in model.parameters())
        initialise_delayed(model, lambda _: True, torch.device("cpu"))
    values = {}
    for name, parameter in model.named_parameters():
        interval = sharding.interval_of(parameter)
        where = None if interval is None else (interval.dim, interval.begin, interval.size)
        values[name] = (parameter.detach().clone(), where)
    return values


@pytest.mark.parametrize("delayed", [False, True], ids=["at_once", "delayed"])
def test_initial_values_do_not_depend_on_the_degree(pool: Pool, delayed: bool) -> None:
    whole = pool.run(1, initial_values, 1, delayed)[0]
    for degree in (2, 3):
        for held in pool.run(degree, initial_values, degree, delayed):
            assert held.keys() == whole.keys()
            for name, (value, where) in held.items():
                expected = whole[name][0] if where is None else whole[name][0].narrow(*where)
                assert torch.equal(value, expected), name


# ---- dropout ---------------------------------------------------------------------------


def run_with_dropout(rank: int, prescaled: bool, optimize: str) -> dict[str, Tensor]:
    """Inputs of norms and of the projection, and the output, of a layer on equal samples."""
    import smp

    init(2, prescaled, optimize)
    with float64():
        torch.manual_seed(5)
        layer = smp.nn.DistributedTransformerLayer(
            4, 8, 32, 64, attention_dropout_prob=0.3, hidden_dropout_prob=0.4
        )
        attention = layer.attention
        # Probabilities are equal and values one, so a context tells how much of them was kept.
        with torch.no_grad():
            for part in (attention.query, attention.key, attention.value):
                nn.init.zeros_(part.weight)
                nn.init.zeros_(part.bias)
            nn.init.ones_(attention.value.bias)
        x = torch.randn(2, 64, 32)
        torch.manual_seed(100 + rank)  # ranks draw different numbers
        seen: dict[str, Tensor] = {}

        def note(name: str) -> Any:
            return lambda module, inputs: seen.update({name: inputs[0].detach().clone()})

        attention.layernorm.register_forward_pre_hook(note("attention"))
        layer.output.layernorm.register_forward_pre_hook(note("output"))
        attention.dense.register_forward_pre_hook(note("context"))
        evaluated = layer.eval()((x, None))[0].detach()
        result = layer.train()((x, None))[0].detach()
        seen |= {"evaluated": evaluated, "result": result}
    return seen


@pytest.mark.parametrize("prescaled", [False, True], ids=["own_batch", "prescaled"])
def test_dropout_of_what_all_ranks_hold_is_bitwise_equal(pool: Pool, prescaled: bool) -> None:
    first, second = pool.run(2, run_with_dropout, prescaled, "speed")
    for name in ("attention", "output"):
        assert torch.equal(first[name], second[name]), name
    check_heads(first, second)
    if prescaled:
        assert torch.equal(first["result"], second["result"])
    assert not torch.equal(first["result"], first["evaluated"])


@pytest.mark.parametrize("prescaled", [False, True], ids=["own_batch", "prescaled"])
def test_dropout_of_what_ranks_share_differs(pool: Pool, prescaled: bool) -> None:
    first, second = pool.run(2, run_with_dropout, prescaled, "memory")
    check_heads(first, second)
    # The samples were equal, and so were the sums: only the masks differ.
    assert first["attention"].shape == second["attention"].shape
    assert not torch.equal(first["attention"], second["attention"])
    if prescaled:
        assert torch.equal(first["result"], second["result"])  # gathered
    else:
        assert not torch.equal(first["result"], second["result"])


def check_heads(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    """Heads of different ranks have different masks, of the right density."""
    assert not torch.equal(first["context"], second["context"])
    for seen in (first, second):
        heads = seen["context"].unflatten(-1, (2, 8))  # tokens may be in several dims
        assert torch.allclose(heads, heads[..., :1].expand_as(heads)), "channels share a mask"
        assert not torch.equal(heads[..., 0, :], heads[..., 1, :]), "heads do not"
        kept = heads[..., 0] * 0.7  # of 64 keys, in 256 rows of scores
        assert abs(kept.mean().item() - 0.7) < 6 * (0.21 / (64 * kept.numel())) ** 0.5


# ---- further arguments -----------------------------------------------------------------


def embed_in_parts(rank: int) -> list[Tensor]:
    """The documented private switches of an embedding."""
    import smp

    init(2, False, "memory")
    table = torch.arange(12.0).view(4, 3)
    every = torch.tensor([[0, 1], [2, 3]])  # a sample of each rank
    results = []
    for gathered, scattered in ((False, True), (True, False), (False, False)):
        embedding = smp.nn.DistributedEmbedding(
            4,
            3,
            _weight=table,
            _skip_allgather=not gathered,
            _skip_scatter_and_merge=not scattered,
        )
        results.append(embedding(every[rank : rank + 1] if gathered else every).detach())
    return results


def test_embedding_leaves_out_what_it_is_told_to(pool: Pool) -> None:
    table = torch.arange(12.0).view(4, 3)
    whole = table.view(2, 2, 3)
    for rank, (own, part, also) in enumerate(pool.run(2, embed_in_parts)):
        assert torch.equal(own, whole[rank : rank + 1])
        assert torch.equal(part, whole[..., slice(0, 2) if rank == 0 else slice(2, 3)])
        assert torch.equal(also, part)


def broadcast_arguments(rank: int, prescaled: bool, optimize: str) -> None:
    """Checks that masks and positions of one sample apply to all samples of a rank."""
    import smp

    init(2, prescaled, optimize)
    with float64():
        torch.manual_seed(3)
        layer = smp.nn.DistributedTransformerLayer(
            4, 4, 8, 8, 0.0, 0.0, causal_mask_size=5, rotary_dim=4
        )
        x = torch.randn(3, 5, 8)
        own = 0 if prescaled else rank  # ranks may differ in them
        mask = torch.randn(2, 1, 5, 5)[own : own + 1]
        positions = torch.randint(9, (2, 5))[own : own + 1]
        expected = layer((x, mask.expand(3, -1, -1, -1), positions.expand(3, -1)))[0]
        assert torch.allclose(layer((x, mask, positions))[0], expected, atol=1e-12)
        assert not torch.allclose(layer((x, None, None))[0], expected, atol=1e-3)


@pytest.mark.parametrize(("prescaled", "optimize"), MODES, ids=MODE_NAMES)
def test_masks_and_positions_of_one_sample_hold_for_all(
    pool: Pool, prescaled: bool, optimize: str
) -> None:
    pool.run(2, broadcast_arguments, prescaled, optimize)
