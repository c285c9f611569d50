"""The decoders that are fuzzed, and what each may raise."""

from __future__ import annotations

import json
import tempfile
import zlib
from pathlib import Path
from typing import Any, Protocol

from smp.checkpoint.huggingface import read_safetensors
from smp.checkpoint.manifest import Manifest, ManifestError
from tests.fuzz.mutator import Format


class Decoder(Format, Protocol):
    """Reads inputs. What it raises otherwise than it is documented to ends the fuzzer."""

    def understands(self, content: bytes) -> bool:
        """Reads an input; False if it is refused."""


class ManifestDecoder:
    """Decodes manifests of checkpoints.

    An input lacks the checksum, and the right one is added. With a wrong checksum the decoder would
    read nothing behind it.
    """

    def understands(self, content: bytes) -> bool:
        text = content + b',\n"crc32":"%08x"}\n' % zlib.crc32(content)
        try:
            manifest = Manifest.from_text(text, "the fuzzer")
        except ManifestError:
            return False
        again = Manifest.from_text(manifest.to_text(), "the fuzzer")
        assert again.files == manifest.files and again.entries == manifest.entries
        return True

    def split(self, content: bytes) -> tuple[Any, bytes]:
        return json.loads(content + b"}"), b""

    def join(self, value: Any, rest: bytes) -> bytes:
        return json.dumps(value).encode().removesuffix(b"}")


class SafetensorsDecoder:
    """Files of whole models."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="smp-fuzz-")
        self._path = Path(self._folder.name) / "model.safetensors"

    def understands(self, content: bytes) -> bool:
        self._path.write_bytes(content)
        try:
            tensors = read_safetensors(self._path)
        except ValueError:
            return False
        for tensor in tensors.values():
            tensor.clone()  # reads all of it
        return True

    def split(self, content: bytes) -> tuple[Any, bytes]:
        end = 8 + int.from_bytes(content[:8], "little")
        return json.loads(content[8:end]), content[end:]

    def join(self, value: Any, rest: bytes) -> bytes:
        header = json.dumps(value).encode()
        return len(header).to_bytes(8, "little") + header + rest


def decoders() -> dict[str, Decoder]:
    """Returns the decoders by the name of their corpus."""
    return {"manifest": ManifestDecoder(), "safetensors": SafetensorsDecoder()}
