"""Sets of images by 8 bytes each, for millions of them.

The 8 bytes are the first of the SHA-256. That two images of a store share them is about as likely as 1 in 10^5 at 20
million images; then one that nothing refers to is kept, and one that is missing is looked for by its whole name.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

_HEX = re.compile(r"[0-9a-fA-F]*")
_LENGTH, _WIDTH = 64, 16
_MERGED = 4_000_000
"""So many keys are gathered before duplicates among them are dropped."""


def keys_of(names: Sequence[str]) -> np.ndarray:
    """Of SHA-256 as text; what is none (an older program's, a test's) has a key too."""
    starts = "".join(name[:_WIDTH] for name in names)
    if all(len(name) == _LENGTH for name in names) and _HEX.fullmatch(starts):
        return np.frombuffer(bytes.fromhex(starts), ">u8").astype(np.uint64)
    return np.array([_key(name) for name in names], np.uint64)


def _key(name: str) -> int:
    if len(name) == _LENGTH and _HEX.fullmatch(name[:_WIDTH]):
        return int(name[:_WIDTH], 16)
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def gather(batches: Iterable[Sequence[str]]) -> np.ndarray:
    """The keys of all names, sorted, each once."""
    whole, waiting, num_waiting = np.array([], np.uint64), list[np.ndarray](), 0
    for names in batches:
        waiting.append(keys_of(names))
        num_waiting += len(names)
        if num_waiting >= _MERGED:
            whole, waiting, num_waiting = np.unique(np.concatenate([whole, *waiting])), [], 0
    return np.unique(np.concatenate([whole, *waiting]))


def absent(names: Sequence[str], known: np.ndarray) -> Iterator[int]:
    """The places of those names that are not among `known`, which is sorted."""
    keys = keys_of(names)
    places = np.searchsorted(known, keys)
    is_there = np.zeros(len(keys), bool)
    inside = places < len(known)
    is_there[inside] = known[places[inside]] == keys[inside]
    yield from np.flatnonzero(~is_there).tolist()
