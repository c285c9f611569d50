"""Model families of Hugging Face that have a distributed form. Imports no transformers."""

from smp.nn.huggingface import bert, gpt2, gptj, gptneo, gptneox, llama, mistral, qwen2, roberta

__all__ = ["bert", "gpt2", "gptj", "gptneo", "gptneox", "llama", "mistral", "qwen2", "roberta"]
