"""The columns of episodes and steps, and the conversion of their records, without loss. Most columns are declared on
the fields of the records; the others are computed, and declared here."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from osworld_pipeline.columns.fields import FLAG, FLOAT, INT32, INT64, TEXT, TIME, column
from osworld_pipeline.columns.records import Row, clean, columns_of, row_of, utc_time, values_of
from osworld_pipeline.domain.digest import canonical_json
from osworld_pipeline.domain.episode import Episode, Step, TokenSequence
from osworld_pipeline.domain.stored import NATS, PIXELS, TOKENS, UTC
from osworld_pipeline.errors import StoreError

_INT64 = 2**63 - 1


def episode_row(episode: Episode) -> Row:
    computed = {field.name: value(episode) for field, value in _COMPUTED}
    return clean(row_of(episode) | computed | _sequence_columns(episode.sequences))


def step_rows(episode: Episode) -> list[Row]:
    names = ("episode_id", "task_id", "checkpoint_id", "purpose")
    shared = {name: str(getattr(episode, name)) for name in names} | {"update": episode.update}
    return [clean(shared | _step_row(step)) for step in episode.steps]


def episode_from(row: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> Episode:
    """The inverse of `episode_row` and `step_rows`; `steps` in any order. Raises StoreError if its tokens cannot be
    split into sequences."""
    played = tuple(_step_from(step) for step in sorted(steps, key=lambda step: step["step_index"]))
    return Episode(**values_of(Episode, row), steps=played, sequences=_sequences_from(row))


def _is_counted(episode: Episode) -> bool:
    """Chat engines and imports leave 0 in their steps."""
    return all(step.prompt_num_tokens > 0 for step in episode.steps) and not episode.source_dataset


def _prompt_tokens(episode: Episode) -> int | None:
    return sum(step.prompt_num_tokens for step in episode.steps) if _is_counted(episode) else None


def _response_tokens(episode: Episode) -> int | None:
    return sum(step.response_num_tokens for step in episode.steps) if _is_counted(episode) else None


def _num_images(episode: Episode) -> int | None:
    return sum(len(sequence.image_steps) for sequence in episode.sequences) if episode.sequences else None


def _sampled_logprobs(sequences: Sequence[TokenSequence]) -> Iterator[float]:
    for sequence in sequences:
        for logprob, is_sampled in zip(sequence.sampled_logprobs, sequence.response_mask, strict=True):
            if is_sampled:
                yield logprob


def _mean_logprob(episode: Episode) -> float | None:
    logprobs = list(_sampled_logprobs(episode.sequences))
    return math.fsum(logprob / len(logprobs) for logprob in logprobs) if logprobs else None


def _ended_at(episode: Episode) -> float | None:
    total_s = episode.times_s.get("total")
    return episode.started_at + total_s if episode.started_at and total_s is not None else None


_COMPUTED: Sequence[tuple[pa.Field, Callable[[Episode], Any]]] = (
    (
        column("is_valid", FLAG, "No fault and no timeout: the episode counts in a denominator."),
        lambda episode: episode.outcome.is_valid,
    ),
    (column("is_success", FLAG, "The outcome is success."), lambda episode: episode.is_success),
    (column("num_steps", INT32, "Number of its rows in `steps`."), lambda episode: len(episode.steps)),
    (
        column("logprob_temperature", FLOAT, "Temperature of sampled_logprobs; NULL: 1, including the banned ids."),
        lambda episode: episode.sampling.temperature or 1.0,
    ),
    (
        column(
            "prompt_tokens",
            INT64,
            "Prompt tokens read over all turns, counted at every turn; NULL if the engine reports none.",
            TOKENS,
        ),
        _prompt_tokens,
    ),
    (
        column("response_tokens", INT64, "Tokens sampled over all turns; NULL if the engine reports none.", TOKENS),
        _response_tokens,
    ),
    (column("num_images", INT32, "Screenshots in its sequences; NULL without sequences."), _num_images),
    (
        column("mean_logprob", FLOAT, "Mean of sampled_logprobs over the sampled tokens; NULL without any.", NATS),
        _mean_logprob,
    ),
    (
        column("started_utc", TIME, "started_at as a timestamp.", UTC),
        lambda episode: utc_time(episode.started_at),
    ),
    (
        column("ended_utc", TIME, "When its desktop was released.", UTC),
        lambda episode: utc_time(_ended_at(episode)),
    ),
)
_SEQUENCES = [
    *columns_of(TokenSequence),
    column("sequence_lengths", pa.list_(pa.int32()), "Lengths at which token_ids is split.", TOKENS),
    column("sequence_image_counts", pa.list_(pa.int32()), "Images of each sequence."),
]
SEQUENCE_COLUMNS = frozenset(field.name for field in _SEQUENCES)

EPISODES = pa.schema([*columns_of(Episode), *(field for field, _ in _COMPUTED), *_SEQUENCES])
STEPS = pa.schema(
    [
        column("episode_id", TEXT, "Its episode."),
        column("task_id", TEXT, "As in the episode."),
        column("checkpoint_id", TEXT, "As in the episode; for training episodes before version 6 the stage's parent."),
        column("purpose", TEXT, "As in the episode."),
        column("update", INT32, "As in the episode."),
        *columns_of(Step),
        column("action", TEXT, "The parsed arguments as canonical JSON; NULL if parsing failed."),
        column("coordinate_x", INT64, "Horizontal position of the action; clamped to 64 bits.", PIXELS),
        column("coordinate_y", INT64, "Vertical position of the action; clamped to 64 bits.", PIXELS),
    ]
)


def _step_row(step: Step) -> Row:
    x, y = step.signals.coordinate or (None, None)
    action = None if step.action is None else canonical_json(step.action)
    return row_of(step) | {"action": action, "coordinate_x": _fit(x), "coordinate_y": _fit(y)}


def _step_from(row: Mapping[str, Any]) -> Step:
    x, y = row["coordinate_x"], row["coordinate_y"]
    values = values_of(Step, row)
    if x is not None and y is not None:
        values["signals"] = replace(values["signals"], coordinate=(x, y))
    return Step(**values, action=None if row["action"] is None else json.loads(row["action"]))


def _fit(value: int | None) -> int | None:
    """A model may write a coordinate of any size; `action` has the exact value."""
    return None if value is None else max(-_INT64, min(_INT64, int(value)))


def _sequence_columns(sequences: Sequence[TokenSequence]) -> Row:
    """One flat list per column; the lengths split it."""
    flat = [field.name for field in columns_of(TokenSequence)]
    return {name: [value for sequence in sequences for value in getattr(sequence, name)] for name in flat} | {
        "sequence_lengths": [len(sequence.token_ids) for sequence in sequences],
        "sequence_image_counts": [len(sequence.image_steps) for sequence in sequences],
    }


def _sequences_from(row: Mapping[str, Any]) -> tuple[TokenSequence, ...]:
    token_ids, mask, logprobs = row["token_ids"], row["response_mask"], row["sampled_logprobs"]
    lengths, counts = row["sequence_lengths"], row["sequence_image_counts"]
    versions, image_steps = row["policy_versions"], row["image_steps"]
    if lengths is None and token_ids:
        raise StoreError(
            f"episode {row['episode_id']} has tokens without the lengths of its sequences: a version before any "
            "release wrote it, and this one cannot read its tokens; remove its part and run its stage again"
        )
    sequences: list[TokenSequence] = []
    start = first_image = 0
    for length, count in zip(lengths or (), counts or (), strict=True):
        end, last_image = start + length, first_image + count
        sequences.append(
            TokenSequence(
                token_ids=tuple(token_ids[start:end]),
                response_mask=tuple(mask[start:end]),
                sampled_logprobs=tuple(logprobs[start:end]),
                policy_versions=tuple(versions[start:end]),
                image_steps=tuple(image_steps[first_image:last_image]),
            )
        )
        start, first_image = end, last_image
    return tuple(sequences)
