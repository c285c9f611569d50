"""Tells hosts without a shared folder what the ranks of the others have written.

The manifest of a checkpoint names the files of all hosts, so the first ranks of their folders
exchange the parts of their ranks, through the store in which the ranks met. Threads that save in
the background may use it, too.
"""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import torch.distributed as dist

from smp.checkpoint.folder import Generation
from smp.checkpoint.store.nodes import Node

_CHUNK = 4 * 2**20  # characters; stores bound the length of a value


class NodeParts:
    """Exchanges the parts of one generation between the leaders of nodes.

    Args:
        meeting: store in which the ranks have met; None: there is one node.
        node: node of this rank, which leads it.
        writing: generation in the folder of this node.
    """

    def __init__(self, meeting: dist.Store | None, node: Node, writing: Generation) -> None:
        self._node, self._writing = node, writing
        self._waiting: list[int] = []
        if not node.is_alone:
            assert meeting is not None
            self._store = dist.PrefixStore(f"checkpoint/{writing.generation}", meeting)
            self._waiting = [leader for leader in node.leaders if leader != node.leader]
        self._has_published = self._has_failed = node.is_alone

    def are_there(self, num_ranks: int) -> bool:
        """Returns whether the folder has the parts of all ranks; exchanges what is new.

        Args:
            num_ranks: number of ranks of the job.
        """
        if not self._has_published:
            self._publish()
        for leader in list(self._waiting):
            self._take(leader)
        return self._writing.parts(range(num_ranks)) is not None

    def _publish(self) -> None:
        parts = self._writing.parts(self._node.ranks)
        if parts is not None:
            own = dict(zip(map(str, self._node.ranks), parts, strict=True))
            self._put(f"parts/{self._node.leader}", own)
            self._has_published = True

    def publish_failures(self) -> None:
        """Tells the other nodes that a rank of this one has failed."""
        if not self._has_failed and (failures := self._writing.failures()):
            self._has_failed = True
            told = {str(rank): reason for rank, reason in failures.items()}
            self._put(f"failed/{self._node.leader}", told)

    def _take(self, leader: int) -> None:
        if self._store.check([f"failed/{leader}"]):
            for rank, reason in self._get(f"failed/{leader}").items():
                self._writing.part_failed(int(rank), reason)
        elif self._store.check([f"parts/{leader}"]):
            for rank, part in self._get(f"parts/{leader}").items():
                self._writing.part_done(int(rank), part)
            self._waiting.remove(leader)
            if self._store.add(f"read/{leader}", 1) == len(self._node.leaders) - 1:
                self._drop(f"parts/{leader}")
                self._store.delete_key(f"read/{leader}")

    def _put(self, key: str, content: Any) -> None:
        text = base64.b64encode(zlib.compress(json.dumps(content).encode())).decode()
        chunks = [text[start : start + _CHUNK] for start in range(0, len(text), _CHUNK)]
        for number, chunk in enumerate(chunks):
            self._store.set(f"{key}/{number}", chunk)
        self._store.set(key, str(len(chunks)))

    def _get(self, key: str) -> Any:
        num_chunks = int(self._store.get(key))
        text = b"".join(self._store.get(f"{key}/{number}") for number in range(num_chunks))
        return json.loads(zlib.decompress(base64.b64decode(text)))

    def _drop(self, key: str) -> None:
        for number in range(int(self._store.get(key))):
            self._store.delete_key(f"{key}/{number}")
        self._store.delete_key(key)
