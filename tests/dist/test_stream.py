"""A model's tensors are sent one by one, in the names of the plain model (`stream_parameters`)."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from smp.checkpoint.huggingface import read_safetensors
from tests.dist.pool import Pool
from tests.dist.resume_training import BEFORE, CASE, Job, make
from tests.dist.test_resume_files import plain_names
from tests.harness import Layers, labelled_loss, samples_of, train_step_of, wrapped
from tests.reference.models import randomise_
from tests.reference.split_families import make_split_batch, make_split_family

JOBS = (
    Job(2, 2, 1, "none", "fp64"),
    Job(2, 1, 2, "sdp2", "bf16"),
    Job(1, 2, 2, "state", "fp32"),
    Job(1, 1, 2, "sdp2", "fp32"),
    Job(1, 1, 1, "none", "fp32"),
    Job(1, 2, 1, "none", "fp16", cp=2),
    Job(2, 1, 1, "none", "bf16", cp=2),
    Job(1, 2, 2, "sdp2", "fp32"),
)


@contextlib.contextmanager
def small_rounds() -> Iterator[None]:
    """Lets ranks meet after every 2000 bytes of the streams that are made inside."""
    from smp.integrations import serving

    former = serving._ROUND_BYTES
    serving._ROUND_BYTES = 2000
    try:
        yield
    finally:
        serving._ROUND_BYTES = former


def collect(rank: int, job: Job, receivers: Any, dtype: Any) -> Any:
    """Trains; returns the tensors that came, and the state that all ranks gather otherwise."""
    import smp

    model, _, train = make(job, seed=1)
    for step in range(BEFORE):
        train(step)
    with small_rounds():
        stream = smp.stream_parameters(model, receivers=receivers, dtype=dtype)
    came = list(stream)
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = plain_names(whole)
    train(BEFORE)
    return came, stream.announcement(), expected


@pytest.mark.sample(keep=4)
@pytest.mark.parametrize("job", JOBS, ids=str)
@pytest.mark.parametrize("receivers", [0, None, "last"])
def test_receivers_get_the_state_of_the_plain_model(pool: Pool, job: Job, receivers: Any) -> None:
    size = job.world_size
    chosen = size - 1 if receivers == "last" else receivers
    results = pool.run(size, collect, job, chosen, None)
    plain = make_split_family(CASE, torch.float32)
    wanted = set(plain.state_dict()) - {"lm_head.weight"}  # tied to the table
    for rank, (came, announced, expected) in enumerate(results):
        assert set(announced["names"]) == wanted
        if chosen not in (None, rank):
            assert came == []
            continue
        assert [name for name, _ in came] == announced["names"]
        for (name, tensor), kind, shape in zip(
            came, announced["dtype_names"], announced["shapes"], strict=True
        ):
            assert torch.equal(tensor, expected[name]), name
            assert (str(tensor.dtype), list(tensor.shape)) == (f"torch.{kind}", shape)
            assert tensor.is_contiguous()


def test_values_are_rounded_to_the_wanted_dtype(pool: Pool) -> None:
    [(came, announced, expected), _] = pool.run(
        2, collect, Job(1, 2, 1, "none", "fp32"), 0, torch.bfloat16
    )
    assert set(announced["dtype_names"]) == {"bfloat16"}
    for name, tensor in came:
        assert torch.equal(tensor, expected[name].bfloat16()), name


def stream_experts(rank: int, folder: str) -> Any:
    import smp

    smp.init({"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "ddp": True,
              "prescaled_batch": True, "microbatches": 2})  # fmt: skip
    plain = randomise_(make_split_family("mixtral", torch.float32), 1).train()
    smp.set_tensor_parallelism(plain)
    model = smp.DistributedModel(plain)
    train_step_of(model, labelled_loss)(make_split_batch("mixtral", 0, 0))
    came = dict(smp.stream_parameters(model, names="files"))
    smp.save_huggingface(model, folder, max_shard_bytes=10000)
    whole = model.state_dict()
    return (came, whole) if rank == 0 else None


def test_experts_have_the_names_of_files(pool: Pool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    came, whole = pool.run(4, stream_experts, str(tmp_path / "out"))[0]
    plain = make_split_family("mixtral", torch.float32)
    plain.load_state_dict(whole)
    plain.save_pretrained(tmp_path / "plain")
    expected = read_safetensors(tmp_path / "plain" / "model.safetensors")
    assert came.keys() == expected.keys() != whole.keys()
    for name, value in expected.items():
        assert torch.equal(came[name], value), name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, value in whole.items():
        assert torch.equal(loaded[name], value), name


# ---- the plain script --------------------------------------------------------------------


def train_plainly(steps: int) -> dict[str, Tensor]:
    net = Layers().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        net(samples_of(step)).square().mean().backward()
        optimizer.step()
    return net.state_dict()


def stream_after_steps(rank: int, config: dict[str, Any], steps: int) -> dict[str, Tensor]:
    import smp

    model = wrapped({"microbatches": 1, "prescaled_batch": True, **config}, Layers().double())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    train_step = train_step_of(model)
    for step in range(steps):
        optimizer.zero_grad()
        train_step(samples_of(step))
        optimizer.step()
    return dict(smp.stream_parameters(model))


@pytest.mark.parametrize("degree", [2, 1])
def test_values_are_those_of_the_plain_script_bit_by_bit(pool: Pool, degree: int) -> None:
    config = {"pipeline_parallel_degree": degree}
    found = pool.run(degree, stream_after_steps, config, 3)[0]
    expected = train_plainly(3)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    assert not torch.equal(expected["layers.0.weight"], Layers().double().layers[0].weight)


# ---- loops that end early ----------------------------------------------------------------


def leave_early(rank: int, how: str) -> tuple[list[int], bool]:
    """Returns the number of tensors in each loop, and whether a later step trained."""
    import smp

    model, _, train = make(Job(2, 1, 2, "sdp2", "fp32"), seed=1)
    train(0)
    counts = []

    def consume(most: int) -> None:
        counts.append(0)
        with small_rounds():
            stream = smp.stream_parameters(model, receivers=None if how == "one of all" else 0)
        for _ in stream:
            counts[-1] += 1
            if counts[-1] == most and rank == 0:
                if how == "raise":
                    raise LookupError("the engine has gone")
                break

    for most in (1, 5, 10**6):
        try:
            consume(most)
        except LookupError as error:
            assert how == "raise" and "the engine" in str(error)
    return counts, train(1) != train(2)


@pytest.mark.parametrize("how", ["break", "raise", "one of all"])
def test_a_receiver_may_leave_its_loop(pool: Pool, how: str) -> None:
    results = pool.run(4, leave_early, how)
    num = len(set(make_split_family(CASE, torch.float32).state_dict())) - 1
    assert results[0] == ([1, 5, num], True)
    for counts, trained in results[1:]:
        assert trained and counts == ([num] * 3 if how == "one of all" else [0] * 3)


def close_by_hand(rank: int) -> tuple[int, int]:
    import smp

    model, _, train = make(Job(2, 1, 1, "none", "fp32"), seed=1)
    train(0)
    with small_rounds():
        stream = smp.stream_parameters(model, receivers=None)
    turns = iter(stream)
    next(turns)
    turns.close()  # type: ignore[attr-defined]
    return len(list(turns)), len(list(smp.stream_parameters(model, receivers=None)))


def test_an_iterator_is_closed_by_hand(pool: Pool) -> None:
    for left, whole in pool.run(2, close_by_hand):
        assert left == 0 < whole


def use_twice(rank: int) -> list[str]:
    import smp

    model, _, train = make(Job(2, 1, 1, "none", "fp32"), seed=1)
    texts = []
    wrong: tuple[dict[str, Any], ...] = (
        {}, {"receivers": 2}, {"dtype": torch.int8}, {"adapters": "none"}, {"adapters": "only"},
        {"names": "x"}, {"receivers": rank}, {"receivers": []},
    )  # fmt: skip
    for arguments in wrong:
        try:
            smp.stream_parameters(model, **arguments)
        except ValueError as error:
            texts.append(str(error))
        if not arguments:
            train(0)
    stream = smp.stream_parameters(model)
    assert len(list(stream)) == (len(stream) if rank == 0 else 0)
    try:
        iter(stream)
    except RuntimeError as error:
        texts.append(str(error))
    return texts


def test_wrong_calls_are_errors_on_all_ranks(pool: Pool) -> None:
    for texts in pool.run(2, use_twice):
        assert len(texts) == 9
        assert "names must be one of model, files, got 'x'" in texts.pop(5)
        assert "the model is not partitioned yet; call this after the first step" in texts[0]
        assert "receivers must be among the ranks 0 to 1, got [2]" in texts[1]
        assert "dtype must be a dtype of floating-point numbers or None" in texts[2]
        assert "adapters must be one of merged, kept, only, got 'none'" in texts[3]
        assert 'adapters="only" is for a model of PEFT' in texts[4]
        assert "receivers is [0] on global_rank 0 and [1] on global_rank 1" in texts[5]
        assert "receivers must be among the ranks 0 to 1, got []" in texts[6]
        assert "a stream of parameters has one loop" in texts[7]


def call_elsewhere(rank: int, where: str) -> tuple[str, str]:
    import smp

    model, _, train = make(Job(2, 1, 1, "none", "fp32"), seed=1)
    train(0)
    try:
        if where == "inside":
            for _ in smp.stream_parameters(model):
                smp.barrier()
        elif rank == 0:
            smp.stream_parameters(model)
        else:
            smp.barrier()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_ranks_that_are_elsewhere_end_the_wait(pool: Pool, where: str) -> None:
    outcomes = pool.outcomes(2, call_elsewhere, where)
    kind, text = outcomes[0 if where == "outside" else 1].value
    assert kind in ("PeerFailure", "RuntimeError"), outcomes
    if where == "outside":
        assert "smp.stream_parameters was called here, and not on all ranks" in text
        assert "for name, tensor in smp.stream_parameters(model): ..." in text
    else:
        assert outcomes[0].value[0] in ("PeerFailure", "RuntimeError")


# ---- an engine that serves ---------------------------------------------------------------


class Engine:
    """Receives weights as the engine of vLLM does, in a process that is no rank of the job.

    Names, dtypes and shapes come first (``update_weights``). Then each tensor is a broadcast by
    the trainer over a group of their own, in the announced order, into memory made for it, and is
    handed to ``load_weights`` as pairs of name and tensor.
    """

    def __init__(self, model: nn.Module, port: int) -> None:
        self.model = model
        store = dist.TCPStore("127.0.0.1", port, 2, False, timedelta(seconds=300))
        self.group = dist.ProcessGroupGloo(store, 1, 2, timedelta(seconds=300))
        self.store = store
        self.loaded: set[str] = set()

    def update_weights(self) -> None:
        announced = json.loads(self.store.get("announcement"))
        self.load_weights(self._received(**announced))

    def _received(
        self, names: list[str], dtype_names: list[str], shapes: list[list[int]]
    ) -> Iterator[tuple[str, Tensor]]:
        for name, dtype, shape in zip(names, dtype_names, shapes, strict=True):
            weight = torch.empty(shape, dtype=getattr(torch, dtype))
            broadcast(self.group, weight)
            yield name, weight

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        own = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, weight in weights:
                assert own[name].dtype == weight.dtype and name not in self.loaded
                own[name].copy_(weight)
                self.loaded.add(name)


def broadcast(group: Any, tensor: Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor], options).wait()


def train_and_send(rank: int, config: dict[str, Any], case: str, port: int) -> Any:
    import smp

    smp.init({"microbatches": 2, "prescaled_batch": True, "ddp": True, **config})
    plain = randomise_(make_split_family(case, torch.float32), 1).train()
    smp.set_tensor_parallelism(plain)
    model = smp.DistributedModel(plain)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    @smp.step
    def train_step(batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = model(**batch)["loss"]
        model.backward(loss)
        return loss

    for step in range(2):
        optimizer.zero_grad()
        train_step(make_split_batch(case, 0, step))
        optimizer.step()
    stream = smp.stream_parameters(model, dtype=torch.bfloat16)
    if rank == 0:
        store = dist.TCPStore(
            "127.0.0.1", port, 2, True, timedelta(seconds=300), wait_for_workers=False
        )
        store.set("announcement", json.dumps(stream.announcement()))
        group = dist.ProcessGroupGloo(store, 0, 2, timedelta(seconds=300))
    for _, tensor in stream:
        broadcast(group, tensor)
    whole = model.state_dict()
    smp.barrier()
    return whole if rank == 0 else None


@pytest.mark.parametrize("case", ["qwen3_tied", "llama"])
def test_an_engine_serves_what_was_trained(pool: Pool, case: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    model = make_split_family(case, torch.bfloat16).eval()
    engines: list[Engine] = []

    def serve() -> None:
        engines.append(Engine(model, port))
        engines[0].update_weights()

    thread = threading.Thread(target=serve)
    thread.start()
    config = {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2}
    state = pool.run(4, train_and_send, config, case, port)[0]
    thread.join()
    names = {name for name, _ in model.named_parameters()}
    assert engines[0].loaded == names
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, state[name].bfloat16()), name
    trained = make_split_family(case, torch.float32)
    trained.load_state_dict(state)
    ids = make_split_batch(case, 0, 5)["input_ids"]
    served = model(input_ids=ids).logits
    assert torch.equal(served, trained.bfloat16().eval()(input_ids=ids).logits)


# ---- adapters ----------------------------------------------------------------------------


def adapted(base: str, targets: list[str]) -> Any:
    import peft
    from transformers import LlamaForSequenceClassification

    torch.manual_seed(3)
    model = LlamaForSequenceClassification.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(
        r=2, lora_alpha=6, task_type="SEQ_CLS", modules_to_save=["score"],
        target_modules=targets,
    )  # fmt: skip
    result = peft.get_peft_model(model, config)
    with torch.no_grad():
        for parameter in result.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    return result


def send_adapted(rank: int, config: dict[str, Any], base: str) -> Any:
    import peft

    import smp

    smp.init({"ddp": True, "microbatches": 2, **config})
    # A split table lacks what an adapter asks of an embedding.
    targets = ["q_proj", "down_proj", *(["embed_tokens"] if smp.tp_size() == 1 else [])]
    plain = adapted(base, targets)
    if smp.tp_size() > 1:
        smp.set_tensor_parallelism(plain)
    model = smp.DistributedModel(plain)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    ids = torch.arange(16).view(4, 4) % 20

    @smp.step
    def train_step(ids: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=ids).logits.square().mean()
        model.backward(loss)
        return loss

    train_step(ids)
    optimizer.step()
    found = {how: dict(smp.stream_parameters(model, adapters=how)) for how in
             ("merged", "kept", "only")}  # fmt: skip
    state = model.state_dict()
    if rank != 0:
        return None
    with torch.no_grad():
        single = adapted(base, targets)
        single.load_state_dict(state)
        files = peft.get_peft_model_state_dict(single, save_embedding_layers=False)
        merged = single.merge_and_unload().state_dict()
    return found, files, merged


@pytest.mark.parametrize(
    "config",
    [{"pipeline_parallel_degree": 2}, {"tensor_parallel_degree": 2},
     {"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0.0}],
    ids=str,
)  # fmt: skip
@pytest.mark.sample(keep=2)
def test_adapters_are_merged_or_sent_beside_the_model(
    pool: Pool, tmp_path: Path, config: dict[str, Any]
) -> None:
    pytest.importorskip("peft")
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2, num_labels=3, pad_token_id=0,
    )  # fmt: skip
    plain = randomise_(LlamaForSequenceClassification(sizes), 2)
    plain.save_pretrained(tmp_path)
    found, files, merged = pool.run(2, send_adapted, config, str(tmp_path))[0]
    assert found["merged"].keys() == plain.state_dict().keys()
    for name, value in merged.items():
        assert torch.equal(found["merged"][name], value), name
    assert not torch.equal(merged["score.weight"], plain.state_dict()["score.weight"])
    assert found["only"].keys() == files.keys()
    for name, value in files.items():
        assert torch.equal(found["only"][name], value), name
    assert found["kept"].keys() == plain.state_dict().keys() | files.keys()
    for name, value in plain.state_dict().items():
        assert torch.equal(found["kept"][name], value), name


def refuse(rank: int) -> str:
    import peft

    import smp

    smp.init({})
    net = Layers()
    net.layers[1].weight = net.layers[0].weight
    config = peft.LoraConfig(r=2, target_modules=["layers.0"])
    model = smp.DistributedModel(peft.get_peft_model(net, config))
    try:
        smp.stream_parameters(model)
    except ValueError as error:
        assert len(dict(smp.stream_parameters(model, adapters="kept"))) == 9
        return str(error)
    return ""


def test_adapters_of_tied_weights_are_not_merged(pool: Pool) -> None:
    pytest.importorskip("peft")
    assert "the weight is tied to another, which has no adapter" in pool.run(1, refuse)[0]


def test_rounds_hold_some_bytes() -> None:
    from smp.integrations.serving import round_ends

    assert round_ends([3, 3, 3, 10, 1], 6) == [2, 4, 5]
    assert round_ends([], 6) == [] and round_ends([7], 6) == [1]
