"""Tells hosts without a shared folder what the ranks of the others have written.

The manifest of a checkpoint names the files of all hosts, so the first ranks of their folders
exchange the parts of their ranks, through the store in which the ranks met. Threads that save or
send in the background may use it, too.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from smp.checkpoint.folder import Generation
from smp.checkpoint.store.nodes import Node

_CHUNK = 4 * 2**20  # characters; stores bound the length of a value


class NodeFailures:
    """Exchanges the failures of ranks in one generation between the leaders of nodes.

    Args:
        meeting: store in which the ranks have met; None: there is one node.
        node: node of this rank, which leads it.
        generation: generation that is saved or sent.
    """

    def __init__(self, meeting: dist.Store | None, node: Node, generation: str) -> None:
        self._node = node
        self._others = [leader for leader in node.leaders if leader != node.leader]
        self._has_failed = node.is_alone
        if not node.is_alone:
            assert meeting is not None
            self._store = dist.PrefixStore(f"checkpoint/{generation}", meeting)

    def publish(self, failures: Mapping[int, str]) -> None:
        """Sends the reasons of this node's ranks to the other nodes, the first time."""
        if failures and not self._has_failed:
            self._has_failed = True
            told = {str(rank): reason for rank, reason in failures.items()}
            self._put(f"failed/{self._node.leader}", told)

    def elsewhere(self) -> dict[int, str]:
        """Returns the reasons that other nodes have sent, by rank."""
        failed = [key for key in map("failed/{}".format, self._others) if self._store.check([key])]
        return {int(rank): text for key in failed for rank, text in self._get(key).items()}

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


class NodeParts(NodeFailures):
    """Exchanges the parts of one generation between the leaders of nodes.

    Args:
        meeting, node: arguments of `NodeFailures`.
        writing: generation in the folder of this node.
    """

    def __init__(self, meeting: dist.Store | None, node: Node, writing: Generation) -> None:
        super().__init__(meeting, node, writing.generation)
        self._writing, self._waiting = writing, list(self._others)
        self._has_published = node.is_alone

    def are_there(self, num_ranks: int) -> bool:
        """Returns whether the folder has the parts of all ranks; exchanges what is new.

        Args:
            num_ranks: number of ranks of the job.
        """
        if not self._has_published:
            self._publish()
        for rank, reason in self.elsewhere().items():
            self._writing.part_failed(rank, reason)
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
        """Sends recorded failures of this node's ranks to the other nodes."""
        self.publish(self._writing.failures())

    def _take(self, leader: int) -> None:
        if self._store.check([f"parts/{leader}"]):
            for rank, part in self._get(f"parts/{leader}").items():
                self._writing.part_done(int(rank), part)
            self._waiting.remove(leader)
            if self._store.add(f"read/{leader}", 1) == len(self._node.leaders) - 1:
                self._drop(f"parts/{leader}")
                self._store.delete_key(f"read/{leader}")

    def _drop(self, key: str) -> None:
        for number in range(int(self._store.get(key))):
            self._store.delete_key(f"{key}/{number}")
        self._store.delete_key(key)
