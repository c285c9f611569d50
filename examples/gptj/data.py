"""Text, tokenizer and batches for `finetune.py`.

Without a file of the user's, the text is what every machine with Python has: its own documentation
(what `help("topics")` shows) and the sources of its standard library.
"""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from pydoc_data import topics

import torch
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 4096
MAX_DEFAULT_BYTES = 3_000_000
VALIDATION_EVERY = 20  # one document in twenty is kept for evaluation
SKIPPED_FOLDERS = {"test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"}
SKIPPED_FOLDERS |= {"site-packages", "dist-packages"}


def default_documents() -> list[str]:
    """Documentation and sources of the installed Python, always in the same order."""
    documents = [topics.topics[name] for name in sorted(topics.topics)]
    num_bytes = sum(len(text) for text in documents)
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts):
            documents.append(path.read_text(encoding="utf-8", errors="replace"))
            num_bytes += len(documents[-1])
            if num_bytes >= MAX_DEFAULT_BYTES:
                break
    return documents


def read_documents(path: str | None) -> list[str]:
    """Documents of a `.jsonl` file (key "text"), paragraphs of any other file, or the default."""
    if path is None:
        return default_documents()
    text = Path(path).read_text(encoding="utf-8")
    if path.endswith(".jsonl"):
        return [json.loads(line)["text"] for line in text.splitlines() if line.strip()]
    return [paragraph for paragraph in text.split("\n\n") if paragraph.strip()]


def train_tokenizer(documents: list[str], vocab_size: int) -> PreTrainedTokenizerBase:
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        documents, vocab_size, special_tokens=[END_OF_TEXT], show_progress=False
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT
    )


class TokenBlocks(Dataset[dict[str, Tensor]]):
    """A long row of tokens, cut into blocks of `seq_len`; labels equal the inputs."""

    def __init__(self, tokens: Tensor, seq_len: int) -> None:
        if tokens.numel() < seq_len:
            raise ValueError(
                f"the text has {tokens.numel()} tokens, fewer than one sequence of {seq_len}; "
                "give more text or a smaller --seq-len"
            )
        num_blocks = tokens.numel() // seq_len
        self.blocks = tokens[: num_blocks * seq_len].view(num_blocks, seq_len)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        block = self.blocks[index].long()
        return {"input_ids": block, "attention_mask": torch.ones_like(block), "labels": block}


def prepare(
    path: str | None, model: str | None, seq_len: int, vocab_size: int = VOCAB_SIZE
) -> tuple[PreTrainedTokenizerBase, TokenBlocks, TokenBlocks]:
    """Tokenizer (of `model`, or trained on the text), training and validation blocks."""
    documents = read_documents(path)
    tokenizer = (
        AutoTokenizer.from_pretrained(model) if model else train_tokenizer(documents, vocab_size)
    )
    parts: dict[bool, list[int]] = {True: [], False: []}
    for index, ids in enumerate(tokenizer(documents, verbose=False)["input_ids"]):
        is_training = index % VALIDATION_EVERY != VALIDATION_EVERY - 1
        parts[is_training] += ids + [tokenizer.eos_token_id]
    blocks = [
        TokenBlocks(torch.tensor(parts[is_training], dtype=torch.int32), seq_len)
        for is_training in (True, False)
    ]
    return tokenizer, blocks[0], blocks[1]


def make_loader(
    blocks: TokenBlocks, batch_size: int, dp_rank: int, dp_size: int, shuffle: bool, seed: int
) -> DataLoader[dict[str, Tensor]]:
    """Batches of one data-parallel rank; all its pipeline ranks see the same ones."""
    sampler = DistributedSampler(blocks, dp_size, dp_rank, shuffle=shuffle, seed=seed)
    if len(blocks) < batch_size * dp_size:
        raise ValueError(
            f"{len(blocks)} sequences do not fill one batch of {batch_size} on each of {dp_size} "
            "data-parallel ranks; give more text, or a smaller --batch-size or --seq-len"
        )
    return DataLoader(blocks, batch_size, sampler=sampler, drop_last=True)
