"""Sets of images by 8 bytes each, for millions of them.

The 8 bytes are the first of the SHA-256. With 20 million images, the probability that two share them is about 1 in
10^5. In that case an unreferenced image may be kept, and a missing image may not be reported.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

_HEX = re.compile(r"[0-9a-fA-F]*")
_LENGTH, _WIDTH = 64, 16
_MERGED = 4_000_000
"""Number of keys gathered before duplicates are removed."""


def keys_of(names: Sequence[str]) -> np.ndarray:
    """The keys of SHA-256 as text; other names (of an older program or a test) get a key too."""
    starts = "".join(name[:_WIDTH] for name in names)
    if all(len(name) == _LENGTH for name in names) and _HEX.fullmatch(starts):
        return np.frombuffer(bytes.fromhex(starts), ">u8").astype(np.uint64)
    return np.array([_key(name) for name in names], np.uint64)


def _key(name: str) -> int:
    if len(name) == _LENGTH and _HEX.fullmatch(name[:_WIDTH]):
        return int(name[:_WIDTH], 16)
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def gather(batches: Iterable[Sequence[str]]) -> np.ndarray:
    """The distinct keys of all names, sorted."""
    return gather_keys(map(keys_of, batches))


def gather_keys(batches: Iterable[np.ndarray]) -> np.ndarray:
    """Does the same as `gather`, for keys."""
    whole, waiting, num_waiting = np.array([], np.uint64), list[np.ndarray](), 0
    for keys in batches:
        waiting.append(keys)
        num_waiting += len(keys)
        if num_waiting >= _MERGED:
            whole, waiting, num_waiting = _merged(whole, waiting), [], 0
    return _merged(whole, waiting)


def _merged(whole: np.ndarray, waiting: Sequence[np.ndarray]) -> np.ndarray:
    """The union of both; takes about twice the memory of the result."""
    if not waiting:
        return whole
    new = np.unique(np.concatenate(waiting))
    new = new[~_is_among(new, whole)]
    return np.insert(whole, np.searchsorted(whole, new), new)


def absent(names: Sequence[str], known: np.ndarray) -> Iterator[int]:
    """The indices of the names that are not in `known`, which is sorted."""
    yield from np.flatnonzero(absent_keys(keys_of(names), known)).tolist()


def absent_keys(keys: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Whether each key is absent from `known`, which is sorted."""
    return ~_is_among(keys, known)


def _is_among(keys: np.ndarray, known: np.ndarray) -> np.ndarray:
    places = np.searchsorted(known, keys)
    found = np.zeros(len(keys), bool)
    inside = places < len(known)
    found[inside] = known[places[inside]] == keys[inside]
    return found
