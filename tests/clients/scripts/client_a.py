"""Client A: fine-tunes GPT-J with tensor parallelism and fp16."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPTJConfig, GPTJForCausalLM

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch.nn import FusedLayerNorm
from smdistributed.modelparallel.torch.nn.huggingface.gptj import (  # noqa: F401
    translate_hf_gptj_state_dict_to_smdistributed,
    translate_hf_gptj_state_dict_to_smdistributed_gptj,
    translate_hf_state_dict_to_smdistributed_gptj,
    translate_state_dict_to_hf_gptj,
)
from tests.clients.scripts import gpt_training as common
from tests.clients.scripts.helpers import buffer_names_of, param_shapes_of, set_seed


def main() -> None:
    args = common.parse()
    common.init(args)
    config = GPTJConfig(
        vocab_size=common.VOCABULARY, n_positions=32, n_embd=args.hidden, n_layer=args.layers,
        n_head=args.heads, n_inner=None, use_cache=False, resid_pdrop=0.1, bos_token_id=0,
        eos_token_id=1,
        **({} if args.hidden // args.heads >= 64 else {"rotary_dim": 4}),
    )  # fmt: skip
    path = f"{args.model_dir}/pretrained"
    if smp.local_rank() == 0 and args.finetune and not args.load_partial:
        set_seed(7)
        GPTJForCausalLM(config).save_pretrained(path)
    smp.barrier()

    def build() -> Any:
        if args.finetune:
            return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float16)
        return AutoModelForCausalLM.from_config(config)

    module = common.create(args, build)
    job = common.Job(args, None, hf_config=config)
    job.wrap(module)
    model: Any = job.model
    # The script reaches its layers through the wrappers, of which fp16 has one more.
    inner = (model.module if args.fp16 else model).module.module
    assert inner is model.get_module()
    num_split = len(list(model.distributed_modules()))
    if num_split:
        layers = inner.transformer.seq_layers
        assert all(hasattr(c, "attention") and hasattr(c, "output") for c in layers.children())
        assert any(isinstance(m, FusedLayerNorm) for m in inner.modules())
    else:
        layers = inner.transformer.h
    job.make_optimizer()
    job.checkpoint_layers(layers)
    job.resume()
    job.train()
    shapes = param_shapes_of(model, job.optimizer)
    assert buffer_names_of(model) is not None and sum(map(len, shapes)) > 0
    plain = None
    if args.finetune and not args.load_partial:
        ids, mask = next(
            iter(
                common.make_loader(
                    args.batch_size, 4 * args.batch_size, common.LENGTH, common.VOCABULARY, True
                )
            )
        )
        model_hf = GPTJForCausalLM.from_pretrained(path).eval()
        plain = model_hf(input_ids=ids, attention_mask=mask, labels=ids)["loss"].item()
    validation = job.evaluate()
    if not args.load_partial:
        job.save_full()
        common.check_whole_file(job, lambda: GPTJForCausalLM(config))
    job.finish(plain=plain, num_split=num_split, validation=validation,
               overflow=bool(job.optimizer.overflow))  # fmt: skip


if __name__ == "__main__":
    main()
