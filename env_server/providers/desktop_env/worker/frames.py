"""The messages between the env server and its workers: a JSON object followed by raw bytes."""

import json
import socket
import struct
from typing import Any

HEADER = struct.Struct(">II")
"""Lengths of the JSON and of the bytes."""
MAX_BYTES = 1024 * 1024 * 1024


def pack(fields: dict[str, Any], blob: bytes = b"") -> bytes:
    data = json.dumps(fields).encode()
    return HEADER.pack(len(data), len(blob)) + data + blob


def unpack_header(header: bytes) -> tuple[int, int]:
    """ValueError if it is not a valid header."""
    lengths = HEADER.unpack(header)
    if sum(lengths) > MAX_BYTES:
        raise ValueError(f"a message of {sum(lengths)} bytes")
    return lengths


def receive(connection: socket.socket) -> tuple[dict[str, Any], bytes]:
    """Blocks. EOFError if the other side is gone."""
    num_json, num_blob = unpack_header(_receive_exactly(connection, HEADER.size))
    fields = json.loads(_receive_exactly(connection, num_json))
    return fields, _receive_exactly(connection, num_blob)


def _receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    parts, missing = [], num_bytes
    while missing:
        part = connection.recv(min(missing, 1 << 20))
        if not part:
            raise EOFError("the other side closed the connection")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
