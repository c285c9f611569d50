"""Losses of classification, regression, segmentation and detection."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.losses.case import (
    CLASS_WEIGHTS,
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
    values,
)


@case("cross-entropy")
def cross_entropy(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


@case("cross-entropy, summed", default=WARNED)
def cross_entropy_sum(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="sum")


@case("class weights", default=WARNED, weight="CLASS_WEIGHTS[y].sum()")
def class_weights(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, weight=CLASS_WEIGHTS)


def with_class_weights() -> Batch:
    return classes()() | {"w": CLASS_WEIGHTS}


@case(
    "class weights as an argument",
    batch=with_class_weights,
    default=WARNED,
    weight="w[y].sum()",
    whole=("w",),
)
def class_weights_given(model: Any, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, weight=w)


@case(
    "class weights as an argument, not named",
    batch=with_class_weights,
    default=EQUAL_WARNED,
)
def class_weights_unnamed(model: Any, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return (F.cross_entropy(model(x), y, reduction="none") * w[y]).mean()


@case("label smoothing")
def smoothing(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, label_smoothing=0.1)


@case(
    "label smoothing with class weights",
    default=WARNED,
    weight="CLASS_WEIGHTS[y].sum()",
)
def smoothing_weights(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, weight=CLASS_WEIGHTS, label_smoothing=0.1)


def ignored_classes() -> Batch:
    y = randint(5, SAMPLES)
    y[torch.tensor([0, 1, 2, 5])] = 255
    return {"x": randn(SAMPLES, 6), "y": y}


@case(
    "cross-entropy with ignored samples",
    batch=ignored_classes,
    default=WARNED,
    weight="(y != 255).sum()",
)
def ignored(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, ignore_index=255)


@case("binary cross-entropy with pos_weight", batch=lambda: values()() | {"y": randn(8, 5) > 0})
def pos_weight(model: Any, x: Tensor, y: Tensor) -> Tensor:
    weight = torch.tensor([2.0, 1.0, 3.0, 1.0, 5.0], dtype=torch.float64)
    return F.binary_cross_entropy_with_logits(model(x), y.double(), pos_weight=weight)


def focal(logits: Tensor, y: Tensor) -> Tensor:
    target = F.one_hot(y, 5).double()
    p = logits.sigmoid()
    near = p * target + (1 - p) * (1 - target)
    plain = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    return (plain * (1 - near) ** 2).sum(1)


@case("focal")
def focal_mean(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return focal(model(x), y).mean()


# The losses of negatives are lost in a piece that has no positive.
@case(
    "focal, by positives (RetinaNet)",
    default=WARNED,
    weight="(y % 2 == 0).sum()",
    weighted=EQUAL_WARNED,
)
def focal_positives(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return focal(model(x), y).sum() / (y % 2 == 0).sum()


def masks() -> Batch:
    y = (randn(SAMPLES, 5, seed=8) > 0.3).double()
    y[0] = 1.0
    return {"x": randn(SAMPLES, 6), "y": y}


@case("dice over the batch", batch=masks, default=WARNED)
def dice(model: Any, x: Tensor, y: Tensor) -> Tensor:
    p = model(x).sigmoid()
    return 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)


@case("dice by sample", batch=masks)
def dice_by_sample(model: Any, x: Tensor, y: Tensor) -> Tensor:
    p = model(x).sigmoid()
    return (1 - (2 * (p * y).sum(1) + 1) / (p.sum(1) + y.sum(1) + 1)).mean()


@case("Tversky over the batch", batch=masks, default=WARNED)
def tversky(model: Any, x: Tensor, y: Tensor) -> Tensor:
    p = model(x).sigmoid()
    hits, wrong, missed = (p * y).sum(), (p * (1 - y)).sum(), ((1 - p) * y).sum()
    return 1 - (hits + 1) / (hits + 0.3 * wrong + 0.7 * missed + 1)


@case("mean squared error", batch=values())
def mse(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


@case(
    "mean squared error with a mask",
    batch=lambda: values()() | {"mask": padding(5)},
    default=WARNED,
    weight="mask.sum()",
)
def mse_mask(model: Any, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return ((model(x) - y).square() * mask).sum() / mask.sum()


@case(
    "smooth L1 by positives",
    batch=lambda: values()() | {"mask": padding(5)},
    default=WARNED,
    weight="mask.sum().clamp(min=1)",
)
def smooth_l1(model: Any, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return F.smooth_l1_loss(model(x)[mask], y[mask], reduction="sum") / mask.sum().clamp(min=1)


@case(
    "sample weights, divided by their sum",
    batch=lambda: values()() | {"w": padding(9).sum(1).double()},
    default=WARNED,
    weight="w.sum()",
)
def sample_weights(model: Any, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return ((model(x) - y).square().mean(1) * w).sum() / w.sum()


@case(
    "sample weights (importance sampling)",
    batch=lambda: values()() | {"w": padding(9).sum(1).double()},
)
def importance(model: Any, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return ((model(x) - y).square().mean(1) * w).mean()


@case("root of the mean squared error", batch=values(), default=WARNED)
def rmse(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y).sqrt()


@case("Gaussian likelihood", batch=values(outputs=2), model=mlp(outputs=4))
def gaussian(model: Any, x: Tensor, y: Tensor) -> Tensor:
    mean, log_var = model(x).chunk(2, -1)
    return F.gaussian_nll_loss(mean, y, log_var.exp())


@case("quantiles", batch=values(outputs=1), model=mlp(outputs=3))
def quantiles(model: Any, x: Tensor, y: Tensor) -> Tensor:
    q = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    off = y - model(x)
    return torch.maximum(q * off, (q - 1) * off).mean()


@case("correlation (Pearson) over the batch", batch=values(), default=WARNED)
def pearson(model: Any, x: Tensor, y: Tensor) -> Tensor:
    a, b = model(x), y
    a, b = a - a.mean(0), b - b.mean(0)
    return 1 - (a * b).sum() / (a.norm() * b.norm())


@case(
    "survival (Cox) over the batch",
    batch=lambda: {"x": randn(8, 6), "t": randn(8, seed=9)},
    model=mlp(outputs=1),
    default=WARNED,
)
def cox(model: Any, x: Tensor, t: Tensor) -> Tensor:
    risk = model(x).squeeze(1)[t.argsort(descending=True)]
    return -(risk - risk.logcumsumexp(0)).mean()


def two_targets() -> Batch:
    y = randint(5, SAMPLES)
    y[:3] = -100
    return {"x": randn(SAMPLES, 6), "y": y, "v": randn(SAMPLES, 5, seed=3), "m": padding(5)}


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.two = mlp()(), nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        return self.one(hidden), self.two(hidden)


@case("two heads, each a mean", batch=lambda: classes()() | {"v": randn(8, 5)}, model=TwoHeads)
def two_heads(model: Any, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
    one, two = model(x)
    return F.cross_entropy(one, y) + 0.3 * F.mse_loss(two, v)


@case("two heads with different masks", batch=two_targets, model=TwoHeads, default=WARNED)
def two_masks(model: Any, x: Tensor, y: Tensor, v: Tensor, m: Tensor) -> Tensor:
    one, two = model(x)
    return F.cross_entropy(one, y) + ((two - v).square() * m).sum() / m.sum()


class Uncertain(TwoHeads):
    """Weighs its two losses with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.log_var = nn.Parameter(torch.tensor([0.3, -0.2]))

    def forward(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:  # type: ignore[override]
        one, two = super().forward(x)
        losses = torch.stack([F.cross_entropy(one, y), F.mse_loss(two, v)])
        return (losses * (-self.log_var).exp() + self.log_var).sum()


@case(
    "uncertainty weights in the model",
    batch=lambda: classes()() | {"v": randn(8, 5)},
    model=Uncertain,
)
def uncertainty(model: Any, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
    loss: Tensor = model(x, y, v)
    return loss


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.two(torch.tanh(self.norm(self.one(x))))
        return out


@case("BatchNorm in training mode", model=Normed, default=WARNED)
def batch_norm(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


@case("mixup before the step", batch=lambda: classes()() | {"z": randint(5, 8, seed=6)})
def mixup_before(model: Any, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    out = model(0.7 * x + 0.3 * x.tanh())
    return 0.7 * F.cross_entropy(out, y) + 0.3 * F.cross_entropy(out, z)


@case("mixup in the step", default=WARNED)
def mixup(model: Any, x: Tensor, y: Tensor) -> Tensor:
    out = model(0.7 * x + 0.3 * x.flip(0))
    return 0.7 * F.cross_entropy(out, y) + 0.3 * F.cross_entropy(out, y.flip(0))


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3))
        self.head = nn.Linear(4, 4)

    def forward(self, images: list[Tensor]) -> list[Tensor]:
        return [self.head(self.convs(image[None]).mean((2, 3)))[0] for image in images]


def detection() -> Batch:
    counts = [3, 1, 2, 5, 1, 1, 4, 2]
    images = [randn(3, 6, 6 + i % 3, seed=20 + i) for i in range(SAMPLES)]
    boxes = [{"boxes": randn(n, 4, seed=30 + i)} for i, n in enumerate(counts)]
    return {"images": images, "targets": boxes}


def box_losses(model: Any, images: list[Tensor], targets: list[dict[str, Tensor]]) -> list[Tensor]:
    assert len(images) == len(targets)
    return [
        (out - target["boxes"]).abs().sum(1)
        for out, target in zip(model(images), targets, strict=True)
    ]


@case("detection lists, a mean over images", batch=detection, model=Detector)
def detect(model: Any, images: list[Tensor], targets: list[dict[str, Tensor]]) -> Tensor:
    return torch.stack([loss.mean() for loss in box_losses(model, images, targets)]).mean()


@case(
    "detection lists, by boxes (DETR)",
    batch=detection,
    model=Detector,
    default=WARNED,
    weight="sum(len(target['boxes']) for target in targets)",
)
def detect_boxes(model: Any, images: list[Tensor], targets: list[dict[str, Tensor]]) -> Tensor:
    num_boxes = sum(len(target["boxes"]) for target in targets)
    return torch.cat(box_losses(model, images, targets)).sum() / num_boxes


@case("texts beside tensors", batch=lambda: classes()() | {"texts": list("abcdefgh")})
def texts(model: Any, x: Tensor, y: Tensor, texts: list[str]) -> Tensor:
    assert len(texts) == len(x)
    shift = torch.tensor([[ord(text) / 100] for text in texts], dtype=torch.float64)
    return F.cross_entropy(model(x + shift), y)


@case("teacher, KL batchmean", batch=pairs())
def distill(model: Any, x: Tensor, z: Tensor) -> Tensor:
    teacher = (z[:, :5] * 2).softmax(1)
    return F.kl_div(F.log_softmax(model(x) / 2, 1), teacher, reduction="batchmean") * 4


@case("variational autoencoder", batch=pairs(), model=mlp(6, 12))
def vae(model: Any, x: Tensor, z: Tensor) -> Tensor:
    mean, log_var = model(x).chunk(2, 1)
    found = mean + z * (0.5 * log_var).exp()
    kl = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum()
    return ((found - x).square().sum() + kl) / len(x)


@case("diffusion, noise with weights by step", batch=lambda: pairs()() | {"t": randint(9, 8)})
def diffusion(model: Any, x: Tensor, z: Tensor, t: Tensor) -> Tensor:
    level = (t[:, None] + 1).double() / 10
    found = model(x * (1 - level) + z * level)
    return (
        (found - z[:, :5]).square().mean(1) * torch.minimum(level[:, 0], level[:, 0] * 0 + 0.5)
    ).mean()


@case("adversarial, hinge", batch=pairs(), model=mlp(outputs=1))
def hinge(model: Any, x: Tensor, z: Tensor) -> Tensor:
    return F.relu(1 - model(x)).mean() + F.relu(1 + model(z)).mean()


@case("relativistic average adversarial", batch=pairs(), model=mlp(outputs=1), default=WARNED)
def relativistic(model: Any, x: Tensor, z: Tensor) -> Tensor:
    real, false = model(x), model(z)
    return F.softplus(false.mean() - real).mean() + F.softplus(false - real.mean()).mean()
