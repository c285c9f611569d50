"""Adam, LAMB and NovoGrad as the papers have them, one parameter after the other, in float64.

Each takes parameters and gradients as lists and changes the parameters in place. Options have the
names of `smp.optimizers`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Adam:
    lr: float = 1e-3
    bias_correction: bool = True
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    adam_w_mode: bool = True
    weight_decay: float = 0.0
    grad_averaging: bool = True
    num_steps: int = 0
    moments: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def direction(self, index: int, p: Tensor, g: Tensor) -> Tensor:
        """The update of a parameter for a learning rate of 1; moves its moments."""
        beta1, beta2 = self.betas
        mean, square = self.moments.get(index, (torch.zeros_like(p), torch.zeros_like(p)))
        if not self.adam_w_mode:
            g = g + self.weight_decay * p
        mean = beta1 * mean + ((1 - beta1) * g if self.grad_averaging else g)
        square = beta2 * square + (1 - beta2) * g * g
        self.moments[index] = mean, square
        if self.bias_correction:
            mean = mean / (1 - beta1**self.num_steps)
            square = square / (1 - beta2**self.num_steps)
        update = mean / (square.sqrt() + self.eps)
        return update + self.weight_decay * p if self.adam_w_mode else update

    def step(self, params: list[Tensor], grads: list[Tensor]) -> None:
        self.num_steps += 1
        for index, (p, g) in enumerate(zip(params, grads, strict=True)):
            p -= self.lr * self.direction(index, p, g)


@dataclass
class Lamb(Adam):
    eps: float = 1e-6
    weight_decay: float = 0.01
    max_grad_norm: float | None = 1.0
    use_nvlamb: bool = False

    def step(self, params: list[Tensor], grads: list[Tensor]) -> None:
        self.num_steps += 1
        norm = float(torch.cat([g.flatten() for g in grads]).norm())
        if self.max_grad_norm and norm > self.max_grad_norm:
            grads = [g * self.max_grad_norm / norm for g in grads]
        for index, (p, g) in enumerate(zip(params, grads, strict=True)):
            update = self.direction(index, p, g)
            ratio = 1.0
            if (self.weight_decay != 0 or self.use_nvlamb) and p.norm() > 0 and update.norm() > 0:
                ratio = float(p.norm() / update.norm())
            p -= self.lr * ratio * update


@dataclass
class NovoGrad:
    lr: float = 1e-3
    bias_correction: bool = True
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    reg_inside_moment: bool = False
    grad_averaging: bool = True
    norm_type: float = 2
    init_zero: bool = False
    num_steps: int = 0
    means: dict[int, Tensor] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)

    def running_norm(self, index: int, g: Tensor) -> float:
        order = 2 if self.norm_type == 2 else torch.inf
        norm = float(torch.linalg.vector_norm(g, order)) if g.numel() else 0.0
        beta2 = self.betas[1]
        old = self.norms.get(index, 0.0 if self.init_zero else norm)
        if self.norm_type == 2:
            new: float = (beta2 * old**2 + (1 - beta2) * norm**2) ** 0.5
        else:
            new = beta2 * old + (1 - beta2) * norm
        self.norms[index] = new
        return new

    def step(self, params: list[Tensor], grads: list[Tensor]) -> None:
        self.num_steps += 1
        beta1, beta2 = self.betas
        correction1 = 1 - beta1**self.num_steps if self.bias_correction else 1.0
        correction2 = (1 - beta2**self.num_steps) ** 0.5 if self.bias_correction else 1.0
        for index, (p, g) in enumerate(zip(params, grads, strict=True)):
            denominator = self.running_norm(index, g) / correction2 + self.eps
            if self.reg_inside_moment:
                g = g / denominator + self.weight_decay * p
            mean = self.means.get(index, torch.zeros_like(p))
            mean = beta1 * mean + ((1 - beta1) * g if self.grad_averaging else g)
            self.means[index] = mean
            if self.reg_inside_moment:
                p -= self.lr * mean / correction1
            else:
                p -= self.lr * (mean / correction1 / denominator + self.weight_decay * p)
