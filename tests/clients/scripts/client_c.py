"""Client C: GPT-2, by tensor parallelism in fp16 or by sharded data parallelism in bf16."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import (  # noqa: F401
    translate_hf_state_dict_to_smdistributed_gpt2,
    translate_state_dict_to_hf_gpt2,
)
from tests.clients.scripts import gpt_training as common
from tests.clients.scripts.data_pipeline import check_forked_child
from tests.clients.scripts.helpers import buffer_names_of, param_shapes_of


def main() -> None:
    args = common.parse()
    common.init(args)
    if args.fork_loader:
        check_forked_child()
    config = GPT2Config(
        vocab_size=common.VOCABULARY, n_positions=32, n_embd=args.hidden, n_layer=args.layers,
        n_head=args.heads, use_cache=False, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    module = common.create(args, lambda: AutoModelForCausalLM.from_config(config))
    job = common.Job(args, None, hf_config=config)
    job.wrap(module)
    model: Any = job.model
    m = model.get_module()
    is_split = any(True for _ in model.distributed_modules())
    layers = m.transformer.seq_layers if is_split else m.transformer.h
    job.place_layers(layers)
    job.make_optimizer()
    job.checkpoint_layers(layers)
    job.resume()
    job.train()
    validation = job.evaluate()
    if args.sharded_data_parallel_degree > 1:
        shapes = param_shapes_of(model, job.optimizer)
        assert sum(len(s) for s in shapes) > 0 and buffer_names_of(model) is not None
        if args.load_partial:
            job.save_partial()
    else:
        job.save_full()
        common.check_whole_file(job, lambda: GPT2LMHeadModel(config))
    job.finish(validation=validation, num_split=int(is_split), norm=job.optimizer._global_grad_norm)


if __name__ == "__main__":
    main()
