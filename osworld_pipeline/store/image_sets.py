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
    return gather_keys(map(keys_of, batches))


def gather_keys(batches: Iterable[np.ndarray]) -> np.ndarray:
    """As `gather`, of keys."""
    whole, waiting, num_waiting = np.array([], np.uint64), list[np.ndarray](), 0
    for keys in batches:
        waiting.append(keys)
        num_waiting += len(keys)
        if num_waiting >= _MERGED:
            whole, waiting, num_waiting = _merged(whole, waiting), [], 0
    return _merged(whole, waiting)


def _merged(whole: np.ndarray, waiting: Sequence[np.ndarray]) -> np.ndarray:
    """Both, in twice the memory of `whole` at most and not in four times."""
    if not waiting:
        return whole
    new = np.unique(np.concatenate(waiting))
    new = new[~_is_among(new, whole)]
    return np.insert(whole, np.searchsorted(whole, new), new)


def absent(names: Sequence[str], known: np.ndarray) -> Iterator[int]:
    """The places of those names that are not among `known`, which is sorted."""
    yield from np.flatnonzero(absent_keys(keys_of(names), known)).tolist()


def absent_keys(keys: np.ndarray, known: np.ndarray) -> np.ndarray:
    """For each key whether it is not among `known`, which is sorted."""
    return ~_is_among(keys, known)


def _is_among(keys: np.ndarray, known: np.ndarray) -> np.ndarray:
    places = np.searchsorted(known, keys)
    found = np.zeros(len(keys), bool)
    inside = places < len(known)
    found[inside] = known[places[inside]] == keys[inside]
    return found
