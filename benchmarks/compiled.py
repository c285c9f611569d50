"""Step time of Hugging Face's models, their blocks compiled, next to eager mode, in one process.

Both are `smp.DistributedModel`; the losses of both must agree, or the run fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import transformers
from timer import compare, measure
from torch import Tensor, nn
from workers import Worker

import smp

_GPT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
MODELS = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", {**_GPT, "rotary_dim": 16}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
}
TOLERANCE = 1e-5


def make_model(name: str, layers: int, hidden: int, vocabulary: int) -> nn.Module:
    model, config, options = MODELS[name]
    sizes = {"vocab_size": vocabulary, "use_cache": False, **options}
    if name == "llama":
        sizes |= {"hidden_size": hidden, "intermediate_size": 3 * hidden}
        sizes |= {"num_hidden_layers": layers, "num_attention_heads": hidden // 64}
    else:
        sizes |= {"n_embd": hidden, "n_layer": layers, "n_head": hidden // 64}
    torch.manual_seed(0)
    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**sizes))
    return made.train()


def make_step(model: nn.Module, ids: Tensor) -> Callable[[], float]:
    @smp.step
    def train_step(ids: Tensor) -> Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        model.backward(loss)
        return loss

    def run() -> float:
        loss = float(train_step(ids).reduce_mean())
        model.zero_grad()
        return loss

    return run


def main() -> None:
    worker = Worker("compiled")
    config = worker.config
    worker.start({"microbatches": 2})
    sizes = (config["num_layers"], config["hidden"], config["vocab_size"])
    ids = torch.randint(0, config["vocab_size"], (config["batch_size"], config["seq_len"]))
    contenders = {
        name: make_step(
            smp.DistributedModel(make_model(config["model"], *sizes), compile=mode), ids
        )
        for name, mode in (("eager", None), ("compiled", "stage"))
    }
    started_s = time.perf_counter()
    losses = {name: run() for name, run in contenders.items()}
    first_s = time.perf_counter() - started_s
    difference = abs(losses["compiled"] / losses["eager"] - 1)
    if difference > TOLERANCE:
        raise RuntimeError(f"losses differ: {losses}")
    timings = measure(contenders, worker.repeats, worker.warmup)
    worker.emit("eager", timings["eager"].summary())
    ratio = compare(timings["compiled"], timings["eager"])
    values = {"first_steps_s": first_s, "loss_difference": difference}
    worker.emit("compiled", timings["compiled"].summary() | ratio | values)
    smp.shutdown()


if __name__ == "__main__":
    main()
