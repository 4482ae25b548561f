"""The sampled tokens of each step as text, with their log-probabilities.

Token ids are decoded with the vocabulary next to the checkpoint's weights (`tokenizer.json`, byte-level BPE in the
format of Qwen and GPT-2), which needs no model library.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import orjson

from osworld_pipeline.web.viewer.settings import NotFoundError


@dataclass(frozen=True, kw_only=True)
class SampledToken:
    text: str
    logprob: float
    """Log-probability under the distribution that sampled the token (`episodes.logprob_temperature`), in nats."""


def sampled_runs(sequences: Iterable[Mapping[str, Any]]) -> list[tuple[list[int], list[float]]]:
    """Ids and log-probabilities of each turn in order: a turn's response is one run of the mask of its sequence, and
    prompt tokens separate two runs. `sequences`: rows of `sequences`."""
    runs = []
    for row in sequences:
        tokens = zip(row["response_mask"], row["token_ids"], row["sampled_logprobs"], strict=True)
        for is_sampled, run in groupby(tokens, key=itemgetter(0)):
            if is_sampled:
                _, ids, logprobs = zip(*run, strict=True)
                runs.append((list(ids), list(logprobs)))
    return runs


def tokens_by_step(sequences: Iterable[Mapping[str, Any]], tokenizer: Path) -> list[list[SampledToken]]:
    """
    Raises:
        NotFoundError: no tokens were recorded, or the vocabulary is missing.
    """
    runs = sampled_runs(sequences)
    if not runs:
        raise NotFoundError("this episode has no token ids: its engine returns only text, or it was imported")
    vocabulary = load_vocabulary(tokenizer)
    return [
        [SampledToken(text=text, logprob=value) for text, value in zip(pieces(ids, vocabulary), values, strict=True)]
        for ids, values in runs
    ]


def pieces(ids: Sequence[int], vocabulary: Mapping[int, bytes]) -> list[str]:
    """The text of each token; a character of several tokens belongs to its last one."""
    texts, waiting = [], b""
    for place, token in enumerate(ids):
        waiting += vocabulary.get(token, f"<{token}>".encode())
        is_last = place == len(ids) - 1
        try:
            texts.append(waiting.decode())
            waiting = b""
        except UnicodeDecodeError as error:
            # Bytes that end inside a character wait for the next token; invalid bytes are replaced.
            if error.reason == "unexpected end of data" and not is_last:
                texts.append("")
                continue
            texts.append(waiting.decode(errors="replace"))
            waiting = b""
    return texts


@lru_cache(maxsize=4)
def load_vocabulary(path: Path) -> Mapping[int, bytes]:
    """Bytes by token id.

    Raises:
        NotFoundError: the file is missing, or of another kind.
    """
    try:
        found = orjson.loads(path.read_bytes())
        model = found["model"]["vocab"]
        to_byte = _bytes_of_characters()
        vocabulary = {token: bytes(to_byte[char] for char in text) for text, token in model.items()}
        added = {entry["id"]: entry["content"].encode() for entry in found.get("added_tokens", ())}
    except FileNotFoundError as error:
        raise NotFoundError(f"there is no tokenizer at {path}: tokens cannot be shown as text") from error
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise NotFoundError(
            f"{path} has no byte-level vocabulary ({error!r}): tokens cannot be shown as text"
        ) from error
    return vocabulary | added


def _bytes_of_characters() -> dict[str, int]:
    """GPT-2's table: printable bytes map to themselves, the others to the characters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}
