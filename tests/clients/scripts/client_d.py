"""Client D: families of models by sharded data parallelism, GPT-J with tensor parallelism too."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import smdistributed.modelparallel.torch as smp
from tests.clients.scripts import gpt_training as common
from tests.clients.scripts.helpers import (
    buffers_by_id,
    offsets_by_id,
    param_groups_of,
    set_seed,
)

_TOKENS = {"vocab_size": common.VOCABULARY, "bos_token_id": 0, "eos_token_id": 1}


def config_of(args: Any) -> Any:
    hidden, layers, heads = args.hidden, args.layers, args.heads
    gpt = {"n_positions": 32, "n_embd": hidden, "n_layer": layers, "n_head": heads}
    wide = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    configs = {
        "gpt2": lambda: transformers.GPT2Config(**_TOKENS, **gpt, use_cache=False),
        "gptj": lambda: transformers.GPTJConfig(**_TOKENS, **gpt, rotary_dim=4, use_cache=False),
        "gpt_neox": lambda: transformers.GPTNeoXConfig(
            **_TOKENS, **wide, intermediate_size=2 * hidden, max_position_embeddings=32,
            use_cache=False,
        ),
        "bloom": lambda: transformers.BloomConfig(
            **_TOKENS, hidden_size=hidden, n_layer=layers, n_head=heads, use_cache=False
        ),
        "falcon": lambda: transformers.FalconConfig(
            **_TOKENS, **wide, multi_query=True, parallel_attn=True, new_decoder_architecture=False,
            use_cache=False,
        ),
        "flan_t5": lambda: transformers.T5Config(
            vocab_size=common.VOCABULARY, d_model=hidden, d_kv=hidden // heads, d_ff=2 * hidden,
            num_layers=layers, num_heads=heads, decoder_start_token_id=0, pad_token_id=0,
            use_cache=False,
        ),
    }  # fmt: skip
    return configs[args.model_type]()


class _T5Attention:
    """The script's subclass of the attention of T5 has another class and the same weights."""

    @staticmethod
    def replace(model: nn.Module) -> nn.Module:
        from transformers.models.t5 import modeling_t5

        class Attention(modeling_t5.T5Attention):  # type: ignore[misc]
            pass

        for module in model.modules():
            for name, child in list(module.named_children()):
                if type(child) is modeling_t5.T5Attention:
                    child.__class__ = Attention
                    setattr(module, name, child)
        return model


def build(args: Any, config: Any) -> nn.Module:
    if args.model_type == "flan_t5":
        return _T5Attention.replace(transformers.T5ForConditionalGeneration(config))
    if args.finetune:
        return transformers.AutoModelForCausalLM.from_pretrained(f"{args.model_dir}/pretrained")
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    if args.model_type == "gpt_neox":
        model.gpt_neox.config.hidden_act = "gelu_new"
        assert "GPTNeoX" in f"{model}"
    return model


def layer_lists(args: Any, m: Any, is_split: bool) -> list[nn.Module]:
    if is_split:
        return [m.transformer.seq_layers if hasattr(m, "transformer") else m.gpt_neox.seq_layers]
    if args.model_type == "gpt_neox":
        return [m.gpt_neox.layers]
    if args.model_type == "flan_t5":
        return [m.encoder.block, m.decoder.block]
    return [m.transformer.h]


def write_pretrained(args: Any, config: Any) -> Any:
    """The first rank leaves a plain state dict, without any user content beside it."""
    set_seed(11)
    plain: Any = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config))
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    if smp.rank() == 0:
        plain.save_pretrained(f"{args.model_dir}/pretrained")
        torch.save(plain.state_dict(), Path(args.model_dir, "fullmodel.pt"))
    smp.barrier()
    return plain.eval()


def main() -> None:
    args = common.parse()
    if args.model_type in ("bloom", "flan_t5", "falcon"):
        args.use_distributed_transformer = 0
    common.init(
        args,
        ddp_dist_backend="auto",
        sdp_hierarchical_allgather=False,
        sdp_gradient_clipping=args.grad_clip,
    )
    config = config_of(args)
    plain = write_pretrained(args, config) if args.load_full or args.finetune else None
    is_split = args.use_distributed_transformer > 0
    module = common.create(
        args,
        lambda: build(args, config),
        zero_init=not is_split,
        distribute_embedding=args.sharded_data_parallel_degree > 1 and smp.tp_size() > 1,
        use_alibi=False,
        fp32_residual_addition=False,
        flash_attention=True,
    )
    job = common.Job(args, None, hf_config=config)
    job.wrap(module)
    model: Any = job.model
    groups = param_groups_of(model)
    offsets, parameters = {}, []
    if not is_split:
        parameters = [list(group["params"]) for group in groups]
        offsets = offsets_by_id(groups)
    job.make_optimizer(groups)
    buffers = {}
    if not is_split:
        buffers = buffers_by_id(parameters, job.optimizer, offsets)
    for layers in layer_lists(args, model.get_module(), is_split):
        job.checkpoint_layers(layers)
    job.resume()
    first = None if plain is None else (job.evaluate(), job.evaluate_plain(plain))
    job.train()
    if buffers:
        log_param_norms(job, buffers)
    norm = job.optimizer._global_grad_norm
    torch.cuda.empty_cache()
    validation = job.evaluate()
    job.save_full()
    job.finish(
        validation=validation,
        norm=norm,
        num_split=len(list(model.distributed_modules())),
        first=first,
    )


def log_param_norms(job: Any, buffers: dict[int, torch.Tensor]) -> None:
    """Norms of whole parameters from the shards of all ranks."""
    squares = torch.stack([shard.float().square().sum() for shard in buffers.values()])
    torch.distributed.all_reduce(squares, group=job.optimizer.ds_param_shard_group)
    whole = job.model.state_dict()
    by_name = dict(job.model.get_module().named_parameters())
    by_id = {id(p): name for name, p in by_name.items()}
    for (key, _), square in zip(buffers.items(), squares, strict=True):
        expected = whole[by_id[key]].float().square().sum()
        torch.testing.assert_close(square, expected, rtol=0.02, atol=1e-5)


if __name__ == "__main__":
    main()
