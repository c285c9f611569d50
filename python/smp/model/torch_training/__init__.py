"""PyTorch's own training code, as scripts call it, on parameters of distributed models."""

from smp.model.torch_training.take_over import take_over as take_over
