"""Reads the header of a safetensors file without its tensors."""

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from osworld_pipeline.errors import EngineError


@dataclass(frozen=True, kw_only=True)
class Span:
    """A tensor's bytes in its file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: Path) -> list[Span]:
    """Raises EngineError if it is not a safetensors file."""
    try:
        with path.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header: dict[str, Any] = json.loads(opened.read(length))
        return [
            Span(
                name=name,
                dtype=entry["dtype"],
                shape=tuple(entry["shape"]),
                start=8 + length + entry["data_offsets"][0],
                end=8 + length + entry["data_offsets"][1],
            )
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except (OSError, ValueError, KeyError, TypeError, IndexError, struct.error) as error:
        raise EngineError(f"{path} cannot be read: {error}") from error


def encode_tensor(name: str, shape: tuple[int, ...], values: bytes) -> bytes:
    """A file with one float32 tensor."""
    entry = {"dtype": "F32", "shape": list(shape), "data_offsets": [0, len(values)]}
    header = json.dumps({name: entry}).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + values
