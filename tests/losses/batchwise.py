"""Losses of representations, preferences and policies; many look at the whole batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.losses.case import (
    EQUAL_WARNED,
    SAMPLES,
    WARNED,
    Batch,
    case,
    classes,
    mlp,
    padding,
    pairs,
    randint,
    randn,
)

# ---- representations


def info_nce(a: Tensor, b: Tensor) -> Tensor:
    logits = F.normalize(a, dim=1) @ F.normalize(b, dim=1).T / 0.2
    return F.cross_entropy(logits, torch.arange(len(a)))


@case("InfoNCE", batch=pairs(), default=WARNED)
def nce(model: Any, x: Tensor, z: Tensor) -> Tensor:
    return info_nce(model(x), model(z))


@case("SimCLR (NT-Xent)", batch=pairs(), default=WARNED)
def simclr(model: Any, x: Tensor, z: Tensor) -> Tensor:
    out = F.normalize(model(torch.cat([x, z])), dim=1)
    logits = (out @ out.T / 0.5).masked_fill(torch.eye(len(out), dtype=torch.bool), -1e9)
    return F.cross_entropy(logits, torch.arange(len(out)).roll(len(x)))


@case("CLIP, two towers", batch=pairs(), default=WARNED)
def clip(model: Any, x: Tensor, z: Tensor) -> Tensor:
    a, b = model(x), model(z)
    return (info_nce(a, b) + info_nce(b, a)) / 2


@case("SigLIP", batch=pairs(), default=WARNED)
def siglip(model: Any, x: Tensor, z: Tensor) -> Tensor:
    logits = F.normalize(model(x), dim=1) @ F.normalize(model(z), dim=1).T * 5 - 1
    return -F.logsigmoid((2 * torch.eye(len(x), dtype=torch.float64) - 1) * logits).sum() / len(x)


@case("supervised contrastive", batch=classes(outputs=2), default=WARNED)
def supcon(model: Any, x: Tensor, y: Tensor) -> Tensor:
    out = F.normalize(model(x), dim=1)
    logs = (out @ out.T).fill_diagonal_(-1e9).log_softmax(1)
    same = (y[:, None] == y).double().fill_diagonal_(0)
    return -((logs * same).sum(1) / same.sum(1).clamp(min=1)).mean()


@case("contrastive with a queue (MoCo)", batch=pairs())
def moco(model: Any, x: Tensor, z: Tensor) -> Tensor:
    out, queue = F.normalize(model(x), dim=1), randn(9, 5, seed=11)
    positive = (out * F.normalize(z[:, :5], dim=1)).sum(1, keepdim=True)
    return F.cross_entropy(torch.cat([positive, out @ queue.T], 1), torch.zeros(len(x)).long())


@case("VICReg", batch=pairs(), default=WARNED)
def vicreg(model: Any, x: Tensor, z: Tensor) -> Tensor:
    a, b = model(x), model(z)
    loss = 25 * F.mse_loss(a, b)
    for out in (a, b):
        centred = out - out.mean(0)
        cov = centred.T @ centred / (len(out) - 1)
        loss = loss + 25 * F.relu(1 - (out.var(0) + 1e-4).sqrt()).mean()
        loss = loss + (cov.square().sum() - cov.diagonal().square().sum()) / out.shape[1]
    return loss


@case("Barlow twins", batch=pairs(), default=WARNED)
def barlow(model: Any, x: Tensor, z: Tensor) -> Tensor:
    a, b = model(x), model(z)
    a, b = ((out - out.mean(0)) / out.std(0) for out in (a, b))
    cross = a.T @ b / len(a)
    return (cross - torch.eye(5)).square().sum()


@case("BYOL", batch=pairs())
def byol(model: Any, x: Tensor, z: Tensor) -> Tensor:
    return 2 - 2 * F.cosine_similarity(model(x), z[:, :5]).mean()


@case("maximum mean discrepancy", batch=pairs(), default=WARNED)
def mmd(model: Any, x: Tensor, z: Tensor) -> Tensor:
    a, b = model(x), model(z)

    def kernel(p: Tensor, q: Tensor) -> Tensor:
        return (-torch.cdist(p, q).square() / 5).exp().mean()

    return kernel(a, a.detach()) + kernel(b, b.detach()) - 2 * kernel(a, b)


def triplets() -> Batch:
    return {name: randn(SAMPLES, 6, seed=40 + i) for i, name in enumerate("apn")}


@case("triplet margin", batch=triplets)
def triplet(model: Any, a: Tensor, p: Tensor, n: Tensor) -> Tensor:
    return F.triplet_margin_loss(model(a), model(p), model(n))


@case(
    "triplet, mean over those with a loss",
    batch=triplets,
    default=WARNED,
)
def triplet_active(model: Any, a: Tensor, p: Tensor, n: Tensor) -> Tensor:
    losses = F.triplet_margin_loss(model(a), model(p), model(n), margin=0.1, reduction="none")
    return losses.sum() / (losses > 0).sum().clamp(min=1)


@case("triplet, hardest in the batch", batch=classes(outputs=2), default=WARNED)
def triplet_hard(model: Any, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    off = torch.cdist(out, out.detach())
    same = y[:, None] == y
    return F.relu((off - 9.0 * ~same).amax(1) - (off + 9.0 * same).amin(1) + 9).mean()


@case("cosine embedding", batch=lambda: pairs()() | {"y": randint(2, 8) * 2 - 1})
def cosine(model: Any, x: Tensor, z: Tensor, y: Tensor) -> Tensor:
    return F.cosine_embedding_loss(model(x), model(z), y)


@case("ArcFace")
def arcface(model: Any, x: Tensor, y: Tensor) -> Tensor:
    cosines = F.normalize(model(x), dim=1) @ F.normalize(torch.eye(5, dtype=torch.float64) + 0.1)
    margin = 0.3 * F.one_hot(y, 5)
    return F.cross_entropy(8 * torch.cos(torch.acos(cosines.clamp(-0.99, 0.99)) + margin), y)


class Codebook(nn.Module):
    """A quantizer whose codes follow what comes by a moving average."""

    def __init__(self, moves: bool = True) -> None:
        super().__init__()
        self.one, self.two, self.moves = nn.Linear(6, 3), nn.Linear(3, 6), moves
        self.register_buffer("codes", randn(4, 3, seed=12))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.one(x)
        found = torch.cdist(z.detach(), self.codes).argmin(1)
        codes = self.codes[found]
        if self.moves:
            with torch.no_grad():
                hits = F.one_hot(found, 4).to(z.dtype)
                means = hits.T @ z / hits.sum(0).clamp(min=1)[:, None]
                used = (hits.sum(0) > 0)[:, None]
                self.codes.copy_(torch.where(used, 0.9 * self.codes + 0.1 * means, self.codes))
        return self.two(z + (codes - z).detach()), F.mse_loss(z, codes)


@case("codebook by a moving average", batch=pairs(), model=Codebook, default=WARNED)
def codebook(model: Any, x: Tensor, z: Tensor) -> Tensor:
    out, commitment = model(x)
    return F.mse_loss(out, z) + 0.25 * commitment


@case("codebook that stays", batch=pairs(), model=lambda: Codebook(moves=False))
def codebook_still(model: Any, x: Tensor, z: Tensor) -> Tensor:
    out, commitment = model(x)
    return F.mse_loss(out, z) + 0.25 * commitment


# ---- preferences and ranks


@case("reward model, pairs", batch=pairs(), model=mlp(outputs=1))
def reward(model: Any, x: Tensor, z: Tensor) -> Tensor:
    return -F.logsigmoid(model(x) - model(z)).mean()


@case("ranks over all pairs of the batch", batch=classes(), model=mlp(outputs=1), default=WARNED)
def ranks(model: Any, x: Tensor, y: Tensor) -> Tensor:
    score = model(x).squeeze(1)
    better = y[:, None] > y
    return (F.softplus(score - score[:, None]) * better).sum() / better.sum()


@case(
    "lists of candidates (listwise softmax)",
    batch=lambda: {"x": randn(8, 3, 6), "y": randint(3, 8)},
    model=mlp(outputs=1),
)
def listwise(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).squeeze(2), y)


class Policy(nn.Module):
    """Log-probabilities of sequences of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(7, 6), mlp(6, 6)(), nn.Linear(6, 7)

    def forward(self, ids: Tensor) -> Tensor:
        logs = self.head(self.body(self.embed(ids[:, :-1]))).log_softmax(-1)
        return logs.gather(2, ids[:, 1:, None]).squeeze(2)


def preferences() -> Batch:
    return {"chosen": randint(7, 8, 6, seed=13), "rejected": randint(7, 8, 6, seed=14)}


def dpo_of(chosen: Tensor, rejected: Tensor) -> Tensor:
    return -F.logsigmoid(chosen.sum(1) - rejected.sum(1) + 0.1).mean()


@case("DPO, chosen and rejected", batch=preferences, model=Policy)
def dpo(model: Any, chosen: Tensor, rejected: Tensor) -> Tensor:
    return dpo_of(model(chosen), model(rejected))


@case(
    "DPO, a collator that concatenates",
    batch=lambda: {"ids": torch.cat(list(preferences().values()))},
    model=Policy,
    default=WARNED,
)
def dpo_concatenated(model: Any, ids: Tensor) -> Tensor:
    return dpo_of(*model(ids).chunk(2))


def episodes() -> Batch:
    return {
        "ids": randint(7, 8, 6, seed=15),
        "old": -randn(8, 5, seed=16).abs(),
        "advantages": randn(8, 5, seed=17),
        "mask": padding(5),
    }


def clipped(new: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    ratio = (new - old).clamp(-1, 1).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


@case(
    "PPO, normalised advantages",
    batch=episodes,
    model=Policy,
    default=WARNED,
)
def ppo(model: Any, ids: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    return clipped(model(ids), old, advantages).mean()


@case(
    "PPO, mean over tokens (DAPO)",
    batch=episodes,
    model=Policy,
    default=WARNED,
    weight="mask.sum()",
)
def dapo(model: Any, ids: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return (clipped(model(ids), old, advantages) * mask).sum() / mask.sum()


@case("GRPO, mean over the tokens of each sequence", batch=episodes, model=Policy)
def grpo(model: Any, ids: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return ((clipped(model(ids), old, advantages) * mask).sum(1) / mask.sum(1)).mean()


@case(
    "REINFORCE, the batch as baseline",
    batch=lambda: {"ids": randint(7, 8, 6), "r": randn(8)},
    model=Policy,
    default=WARNED,
)
def reinforce(model: Any, ids: Tensor, r: Tensor) -> Tensor:
    return -(model(ids).sum(1) * (r - r.mean())).mean()


@case("temporal difference (DQN)", batch=lambda: classes()() | {"r": randn(8)})
def dqn(model: Any, x: Tensor, y: Tensor, r: Tensor) -> Tensor:
    return F.smooth_l1_loss(model(x).gather(1, y[:, None]).squeeze(1), r)


class Experts(nn.Module):
    """Four experts, one for each token, and a loss that balances them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.router = mlp(6, 6)(), nn.Linear(6, 4)
        self.experts = nn.ModuleList(nn.Linear(6, 5) for _ in range(4))
        with torch.no_grad():  # else all samples go to one
            self.router.weight *= 20

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.router(x)
        x = self.body(x)
        p = logits.softmax(-1)
        best = F.one_hot(p.argmax(-1), 4)
        out = torch.stack([expert(x) for expert in self.experts], -1)
        balance = 4 * (best.double().mean(0) * p.mean(0)).sum()
        return (out * (best * p)[:, None]).sum(-1), balance, logits


# On "pp 2" both halves of the batch use all experts alike; single samples do not.
@case("experts, balance over the batch", model=Experts, default={"pp 2": EQUAL_WARNED, "": WARNED})
def balance(model: Any, x: Tensor, y: Tensor) -> Tensor:
    out, balance, _ = model(x)
    return F.cross_entropy(out, y) + 0.5 * balance


@case("experts, z-loss of the router", model=Experts)
def z_loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    out, _, logits = model(x)
    return F.cross_entropy(out, y) + 0.1 * logits.logsumexp(-1).square().mean()
