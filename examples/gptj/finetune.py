"""Fine-tunes a Hugging Face GPT-J (or trains a small one) over several processes.

torchrun --nproc-per-node 2 examples/gptj/finetune.py          # layers split over two processes
torchrun --nproc-per-node 4 examples/gptj/finetune.py --dp 2   # two replicas of two processes
mpirun -np 2 python examples/gptj/finetune.py
python examples/gptj/finetune.py                               # one process
"""

import argparse
import math
import os
import sys
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

import torch
from check import Check, Plain
from data import make_loader, prepare
from display import Display
from transformers import AutoModelForCausalLM, GPTJConfig, GPTJForCausalLM
from transformers import get_linear_schedule_with_warmup as linear_schedule

import smp
from smp.nn.huggingface.gptj import translate_state_dict_to_hf_gptj as names_of_hugging_face
from smp.world.launch import read_launch

NUM_CHECKED_STEPS = NUM_TRACED_STEPS = 3
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}
FUSED_TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2}  # other operators round in other places


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", help="folder or hub name; default: a small GPT-J made here")
    add("--data", help='text file, or .jsonl with "text"; default: texts of the installed Python')
    add("--pp", type=int, help="pipeline stages; default: processes / dp")
    add("--dp", type=int, default=1, help="data-parallel replicas")
    add("--microbatches", type=int, default=4)
    add("--pipeline", choices=["interleaved", "simple"], default="interleaved")
    add("--seq-len", type=int, default=128)
    add("--batch-size", type=int, default=16, help="sequences per replica and step")
    add("--precision", choices=["fp32", "bf16"], default="fp32", help="bf16: torch.autocast")
    add("--fused", action="store_true", help="GPT-J: layers of smp.nn in place of Hugging Face's")
    add("--steps", type=int, default=150)
    add("--eval-batches", type=int, default=8)
    add("--lr", type=float, default=3e-3)
    add("--seed", type=int, default=1)
    add("--prompt", default="The ", help="beginning of the sample at the end")
    add("--check", action="store_true", help="compare the first steps with one process")
    add("--trace", help="page to write: what each rank did in the last steps of training")
    add("--out", type=Path, help="folder for metrics and a checkpoint of each rank's part")
    add("--save-full", action="store_true", help="also write the whole model to OUT/model")
    args = parser.parse_args()
    if args.save_full and args.out is None:
        parser.error("--save-full needs --out")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    args.pp = args.pp or max(1, read_launch(os.environ, "").world_size // args.dp)
    return args


def make_model(args, tokenizer):
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model)
        model.config.use_cache = False
        return model
    torch.manual_seed(args.seed)
    config = GPTJConfig(
        vocab_size=len(tokenizer),
        n_positions=args.seq_len,
        n_embd=128,
        n_layer=4,
        n_head=4,
        rotary_dim=16,
        use_cache=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return GPTJForCausalLM(config)


def make_training_model(args, tokenizer):
    """The model that is wrapped; with --fused its layers are replaced then."""
    if not args.fused:
        return make_model(args, tokenizer)
    with smp.tensor_parallelism():
        model = make_model(args, tokenizer)
    if model.config.model_type != "gptj":
        raise ValueError(f"--fused is for GPT-J, and --model is {model.config.model_type}")
    return model


def make_optimizer(model, args):
    return torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))


def make_schedule(optimizer, args):
    return linear_schedule(optimizer, args.steps // 10, args.steps)


def compute_loss(model, batch, precision):
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.autocast(device_type, torch.bfloat16, enabled=precision == "bf16"):
        return model(**batch).loss


@smp.step
def train_step(model, batch, precision):
    loss = compute_loss(model, batch, precision)
    model.backward(loss)
    return loss


@smp.step
def eval_step(model, batch, precision):
    return compute_loss(model, batch, precision)


@torch.no_grad()
def evaluate(model, loader, args):
    """Perplexity over the validation batches of all replicas."""
    model.eval()
    batches = islice(loader, args.eval_batches)
    losses = [eval_step(model, batch, args.precision).reduce_mean().item() for batch in batches]
    model.train()
    losses = sum(smp.allgather(losses, smp.DP_GROUP), [])
    return math.exp(sum(losses) / len(losses))


def epochs(loader):
    epoch = 0
    while True:
        loader.sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def train(model, loader, args, check):
    optimizer = smp.DistributedOptimizer(make_optimizer(model, args))
    scheduler = make_schedule(optimizer, args)
    num_sequences = args.batch_size * smp.dp_size()
    with Display(model, args.steps, num_sequences, args.seq_len, args.out) as display:

        def run(batches):
            for batch in batches:
                loss = train_step(model, batch, args.precision).reduce_mean()
                if check is not None:
                    check.record(loss, model)
                smp.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                display.update(loss.item())

        batches = islice(epochs(loader), args.steps)
        run(islice(batches, max(0, args.steps - NUM_TRACED_STEPS)))
        with smp.trace(args.trace) if args.trace else nullcontext():
            run(batches)
    return optimizer


def finish(model, optimizer, tokenizer, args):
    """Checkpoints, and a sample from the whole model on rank 0."""
    if args.out and smp.rdp_rank() == 0:
        state = {"model": model.local_state_dict(), "optimizer": optimizer.local_state_dict()}
        smp.save(state, str(args.out / "checkpoint.pt"), partial=True)
    whole = model.state_dict(gather_to_rank0=True)
    if smp.rank() != 0:
        return
    plain_model = make_model(args, tokenizer).eval()
    plain_model.load_state_dict(names_of_hugging_face(whole) if args.fused else whole)
    prompt = tokenizer(args.prompt, return_tensors="pt")
    options = {"max_new_tokens": 60, "do_sample": True, "top_k": 20, "use_cache": True}
    sample = plain_model.generate(**prompt, **options, pad_token_id=tokenizer.eos_token_id)
    print(f"sample:\n{tokenizer.decode(sample[0])}")
    if args.save_full:
        plain_model.save_pretrained(args.out / "model")
        tokenizer.save_pretrained(args.out / "model")


def main():
    args = parse_args()
    layout = {"pipeline_parallel_degree": args.pp, "microbatches": args.microbatches}
    smp.init(layout | {"pipeline": args.pipeline, "ddp": True})
    if torch.cuda.is_available():
        torch.cuda.set_device(smp.local_rank() % torch.cuda.device_count())

    # Rank 0 prepares the text, the others receive it.
    prepared = None
    if smp.rank() == 0:
        print("text: reading, and making a tokenizer", flush=True)
        prepared = prepare(args.data, args.model, args.seq_len)
    tokenizer, train_set, valid_set = smp.allgather(prepared, smp.WORLD)[0]

    def loader(blocks, dp_rank, shuffle):
        return make_loader(blocks, args.batch_size, dp_rank, smp.dp_size(), shuffle, args.seed)

    model = make_training_model(args, tokenizer)
    tolerance = (FUSED_TOLERANCE if args.fused else TOLERANCE)[args.precision]
    check = Check(model, NUM_CHECKED_STEPS, tolerance) if args.check else None
    model = smp.DistributedModel(model)
    if smp.rank() == 0:
        size = f"{len(train_set)} sequences of {args.seq_len} tokens"
        print(f"training: {args.steps} steps of {args.batch_size} out of {size}", flush=True)
    valid_loader = loader(valid_set, smp.dp_rank(), shuffle=False)
    before = evaluate(model, valid_loader, args)
    optimizer = train(model, loader(train_set, smp.dp_rank(), shuffle=True), args, check)
    after = evaluate(model, valid_loader, args)
    if smp.rank() == 0:
        print(f"perplexity: {before:.1f} before, {after:.1f} after {args.steps} steps")
    finish(model, optimizer, tokenizer, args)
    if check is None:
        return 0
    replicas = [loader(train_set, dp_rank, shuffle=True) for dp_rank in range(smp.dp_size())]
    translate = names_of_hugging_face if args.fused else dict
    plain = Plain(compute_loss, make_optimizer, make_schedule, translate)
    return 0 if check.agrees(replicas, args, plain) else 1


if __name__ == "__main__":
    sys.exit(main())
