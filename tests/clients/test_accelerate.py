"""A loop written for Accelerate: with `SMPAccelerator` it does what it does in one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.pool import Pool


def loop(rank: int, folder: str, config: dict[str, Any], batch: int, resumes: bool) -> Any:
    """Losses and accuracy; what is done differently with smp is the step function."""
    import smp

    if config:
        smp.init(config)
        from smp.integrations.accelerator import SMPAccelerator as Accelerator
    else:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
        from accelerate import Accelerator

    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DataLoaderConfiguration, set_seed
    from torch.utils.data import DataLoader

    from tests.clients.scripts.trainer_models import model_of, samples_of

    AcceleratorState._reset_state(reset_partial_state=True)  # of an earlier test in this process
    GradientState._reset_state()
    shuffling = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator: Any = Accelerator(
        cpu=True, gradient_accumulation_steps=2, dataloader_config=shuffling
    )
    set_seed(3)
    model = model_of("roberta")
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    # Accelerate takes a step of the schedule for each replica.
    decay = 0.95 if config else 0.95**2
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: decay**step)
    loader: Any = DataLoader(samples_of("roberta", 40, 1), batch_size=batch, shuffle=True)  # type: ignore[arg-type]
    evaluation: Any = DataLoader(samples_of("roberta", 11, 2), batch_size=batch)  # type: ignore[arg-type]
    model, optimizer, loader, evaluation, scheduler = accelerator.prepare(
        model, optimizer, loader, evaluation, scheduler
    )

    @smp.step
    def train_step(model: Any, samples: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = model(**samples).loss
        accelerator.backward(loss)
        return loss

    @smp.step
    def logits_of(model: Any, samples: dict[str, torch.Tensor]) -> torch.Tensor:
        logits: torch.Tensor = model(**samples).logits
        return logits

    if resumes:
        accelerator.load_state(folder)
    losses, rates = [], []
    for samples in loader:
        model.train()
        with accelerator.accumulate(model):
            if config:
                loss = train_step(model, samples).reduce_mean()
            else:
                loss = model(**samples).loss
                accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        rates.append(optimizer.param_groups[0]["lr"])
        if len(losses) == 2 and config and not resumes:
            accelerator.save_state(folder)
    model.eval()
    logits, labels = [], []
    for samples in evaluation:
        with torch.no_grad():
            out = logits_of(model, samples).concat() if config else model(**samples).logits
        logits.append(accelerator.gather_for_metrics(out))
        labels.append(accelerator.gather_for_metrics(samples["labels"]))
    state = accelerator.get_state_dict(model)
    return {
        "losses": losses,
        "rates": rates,
        "logits": torch.cat(logits),
        "labels": torch.cat(labels),
        "state": sorted(state),
        "main": accelerator.is_main_process,
        "num_local": sum(1 for _ in model.local_parameters()) if config else 0,
    }


@pytest.mark.sample(keep=0)
def test_a_loop_of_accelerate_runs_over_a_pipeline(pool: Pool, tmp_path: Path) -> None:
    (expected,) = pool.run(1, loop, "", {}, 8, False)
    config = {"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True}
    results = pool.run(4, loop, str(tmp_path), config, 4, False)
    assert len(expected["losses"]) == 5, "the last update takes one batch only"
    for result in results:
        assert result["losses"] == pytest.approx(expected["losses"], abs=1e-4)
        assert torch.allclose(result["logits"], expected["logits"], atol=1e-4)
        assert torch.equal(result["labels"], expected["labels"]) and len(result["labels"]) == 11
        assert result["num_local"] > 0
        assert result["rates"] == pytest.approx(expected["rates"])
    assert [result["main"] for result in results] == [True, False, False, False]
    again = pool.run(4, loop, str(tmp_path), config, 4, True)
    assert again[0]["losses"][0] != results[0]["losses"][0], "begins with what was saved"
    assert all(result["rates"][0] == results[0]["rates"][1] for result in again)
    assert results[0]["state"] == expected["state"] and results[1]["state"] == []


def make_without_torchrun(rank: int) -> str:
    import smp

    smp.init({"pipeline_parallel_degree": 2, "ddp": True})
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    from accelerate.state import AcceleratorState

    from smp.integrations.accelerator import SMPAccelerator

    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(RuntimeError) as caught:
        SMPAccelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    return str(caught.value)


def test_processes_that_accelerate_does_not_see_are_an_error(pool: Pool) -> None:
    for rank, message in enumerate(pool.run(2, make_without_torchrun)):
        assert f"rank 0 of 1, but it is rank {rank} of 2" in message and "--torch-env" in message
