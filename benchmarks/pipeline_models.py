"""Models that `pipeline` trains: written as by a user, and the same cut by hand for 1F1B."""

from __future__ import annotations

import torch
from models import Embedding, GptShape, token_loss
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPTJConfig, GPTJForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import create_causal_mask

KINDS = ("plain", "gptj", "llama")


class Attention(nn.Module):
    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden)
        self.proj = nn.Linear(shape.hidden, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        qkv = self.qkv(x).view(batch, seq, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attention = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(attention.transpose(1, 2).reshape(batch, seq, hidden))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.hidden, 4 * shape.hidden)
        self.down = nn.Linear(4 * shape.hidden, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.hidden)
        self.attention = Attention(shape)
        self.norm2 = nn.LayerNorm(shape.hidden)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class PlainGpt(nn.Module):
    """Plain modules; knows nothing of pipelines. Returns the loss."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.embedding = Embedding(shape)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab_size, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class GptjLoss(nn.Module):
    """`GPTJForCausalLM` with labels, as a model that returns its loss."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.lm = GPTJForCausalLM(
            GPTJConfig(
                vocab_size=shape.vocab_size,
                n_positions=shape.seq_len,
                n_embd=shape.hidden,
                n_layer=shape.num_layers,
                n_head=shape.num_heads,
                rotary_dim=shape.hidden // shape.num_heads // 2,
                use_cache=False,  # of keys and values: for generation
            )
        )

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.lm(input_ids=ids, labels=targets).loss
        return loss


class LlamaLoss(nn.Module):
    """`LlamaForCausalLM` with labels, an MLP as large as that of the others."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.lm = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=shape.vocab_size,
                hidden_size=shape.hidden,
                intermediate_size=8 * shape.hidden // 3,
                num_hidden_layers=shape.num_layers,
                num_attention_heads=shape.num_heads,
                max_position_embeddings=shape.seq_len,
                use_cache=False,
                pad_token_id=0,
                bos_token_id=0,
                eos_token_id=0,
            )
        )

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.lm(input_ids=ids, labels=targets).loss
        return loss


class PlainStage(nn.Module):
    """Consecutive blocks; the first stage embeds, the last one returns logits."""

    def __init__(self, model: PlainGpt, stage_idx: int, num_stages: int) -> None:
        super().__init__()
        size = len(model.blocks) // num_stages
        layers: list[nn.Module] = list(model.blocks[stage_idx * size : (stage_idx + 1) * size])
        if stage_idx == 0:
            layers.insert(0, model.embedding)
        if stage_idx == num_stages - 1:
            layers += [model.norm, model.head]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


class GptjStage(nn.Module):
    """The same for GPT-J. Each stage makes mask and positions itself, which costs very little."""

    def __init__(self, model: GptjLoss, stage_idx: int, num_stages: int) -> None:
        super().__init__()
        transformer = model.lm.transformer
        size = len(transformer.h) // num_stages
        self.config = model.lm.config
        self.first = nn.Sequential(transformer.wte, transformer.drop) if stage_idx == 0 else None
        self.blocks = nn.ModuleList(transformer.h[stage_idx * size : (stage_idx + 1) * size])
        is_last = stage_idx == num_stages - 1
        self.last = nn.Sequential(transformer.ln_f, model.lm.lm_head) if is_last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.first is not None:
            x = self.first(x)
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=None,
            past_key_values=None,
            position_ids=positions,
        )
        for block in self.blocks:
            x = block(x, attention_mask=mask, position_ids=positions, use_cache=False)[0]
        return x if self.last is None else self.last(x)


class LlamaStage(nn.Module):
    """The same for Llama."""

    def __init__(self, model: LlamaLoss, stage_idx: int, num_stages: int) -> None:
        super().__init__()
        decoder = model.lm.model
        size = len(decoder.layers) // num_stages
        self.first = decoder.embed_tokens if stage_idx == 0 else None
        self.rotary = decoder.rotary_emb
        self.blocks = nn.ModuleList(decoder.layers[stage_idx * size : (stage_idx + 1) * size])
        is_last = stage_idx == num_stages - 1
        self.last = nn.Sequential(decoder.norm, model.lm.lm_head) if is_last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.first is not None:
            x = self.first(x)
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        rotation = self.rotary(x, positions)
        for block in self.blocks:
            # Without a mask SDPA is causal by itself.
            out = block(
                x, attention_mask=None, position_ids=positions, position_embeddings=rotation
            )
            x = out[0] if isinstance(out, tuple) else out
        return x if self.last is None else self.last(x)


def make_model(kind: str, shape: GptShape) -> nn.Module:
    """The whole model with the parameters of seed 0."""
    torch.manual_seed(0)
    return {"plain": PlainGpt, "gptj": GptjLoss, "llama": LlamaLoss}[kind](shape)


def make_stage(model: nn.Module, stage_idx: int, num_stages: int) -> nn.Module:
    """Makes one of the equal parts of a model of :func:`make_model`; shares its modules."""
    if isinstance(model, PlainGpt):
        return PlainStage(model, stage_idx, num_stages)
    if isinstance(model, LlamaLoss):
        return LlamaStage(model, stage_idx, num_stages)
    assert isinstance(model, GptjLoss)
    return GptjStage(model, stage_idx, num_stages)


def shifted_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Labels are the inputs: each position predicts the next token, the last one nothing."""
    return token_loss(logits[:, :-1], targets[:, 1:])


def make_batch(kind: str, shape: GptShape, batch_size: int) -> tuple[Tensor, Tensor]:
    """Token ids and what `forward` takes as its second argument."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(shape.vocab_size, (batch_size, shape.seq_len + 1), generator=generator)
    inputs = ids[:, :-1].contiguous()
    return inputs, (ids[:, 1:].contiguous() if kind == "plain" else inputs)


def loss_of(kind: str) -> object:
    """Loss of logits, for the last stage of the hand-made pipeline."""
    return token_loss if kind == "plain" else shifted_loss
