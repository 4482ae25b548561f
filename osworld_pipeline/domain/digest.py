"""Content digests: one canonical JSON form and one hash, so that equal values have equal names."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

Json = str | int | float | bool | None | Sequence["Json"] | Mapping[str, "Json"]


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces; equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def digest_json(value: Any) -> str:
    """SHA-256 (hex) of the canonical JSON of `value`."""
    return digest_bytes(canonical_json(value).encode())


def digest_bytes(data: bytes) -> str:
    """SHA-256 (hex) of `data`; the name of an image blob."""
    return hashlib.sha256(data).hexdigest()
