"""Model families of Hugging Face that have a distributed form. Imports no transformers."""

from smp.nn.huggingface import bert, gpt2, gptj, gptneo, gptneox, llama, roberta
from smp.nn.huggingface.pretrained import was_pretrained
from smp.nn.huggingface.register import register_available

__all__ = [
    "bert",
    "gpt2",
    "gptj",
    "gptneo",
    "gptneox",
    "llama",
    "register_available",
    "roberta",
    "was_pretrained",
]
