"""The columns of episodes, steps and sequences, and the conversion of their records, without loss except for lone
surrogates in text and coordinates beyond 64 bits. Most columns are declared on the fields of the records; the others
are computed, and declared here."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from osworld_pipeline.columns.fields import FLAG, FLOAT, INT32, INT64, TEXT, TIME, column
from osworld_pipeline.columns.records import Row, clean, columns_of, record_from, row_of, utc_time, values_of
from osworld_pipeline.domain.digest import canonical_json
from osworld_pipeline.domain.episode import Episode, Step, TokenSequence
from osworld_pipeline.domain.stored import NATS, PIXELS, TOKENS, UTC

_INT64 = 2**63 - 1


def episode_row(episode: Episode) -> Row:
    computed = {field.name: value(episode) for field, value in _COMPUTED}
    return clean(row_of(episode) | computed)


def step_rows(episode: Episode) -> list[Row]:
    names = ("episode_id", "task_id", "checkpoint_id", "purpose")
    shared = {name: str(getattr(episode, name)) for name in names} | {"update": episode.update}
    return [clean(shared | _step_row(step)) for step in episode.steps]


def sequence_rows(episode: Episode) -> list[Row]:
    return [
        {"episode_id": episode.episode_id, "sequence_index": number, **row_of(sequence)}
        for number, sequence in enumerate(episode.sequences)
    ]


def episode_from(
    row: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], sequences: Sequence[Mapping[str, Any]]
) -> Episode:
    """The inverse of `episode_row`, `step_rows` and `sequence_rows`; `steps` and `sequences` in any order."""
    played = tuple(_step_from(step) for step in sorted(steps, key=lambda step: step["step_index"]))
    sampled = sorted(sequences, key=lambda sequence: sequence["sequence_index"])
    return Episode(
        **values_of(Episode, row),
        steps=played,
        sequences=tuple(map(sequence_from, sampled)),
    )


def sequence_from(row: Mapping[str, Any]) -> TokenSequence:
    """The inverse of one of `sequence_rows`."""
    return record_from(TokenSequence, row)


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
    # Not fsum, which raises an error for infinities of both signs: they become NaN.
    return sum(logprob / len(logprobs) for logprob in logprobs) if logprobs else None


def _ended_at(episode: Episode) -> float | None:
    total_s = episode.times_s.get("total")
    return episode.started_at + total_s if episode.started_at and total_s is not None else None


_COMPUTED: Sequence[tuple[pa.Field, Callable[[Episode], Any]]] = (
    (
        column("is_valid", FLAG, "No fault, no timeout and not touched: the episode counts in a denominator."),
        lambda episode: episode.outcome.is_valid,
    ),
    (column("is_success", FLAG, "The outcome is success."), lambda episode: episode.is_success),
    (column("num_steps", INT32, "Number of its rows in `steps`."), lambda episode: len(episode.steps)),
    (
        column(
            "logprob_temperature",
            FLOAT,
            "Temperature of sampled_logprobs; NULL: they are at temperature 1, over all ids including the banned ones.",
        ),
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

EPISODES = pa.schema([*columns_of(Episode), *(field for field, _ in _COMPUTED)])
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
SEQUENCES = pa.schema(
    [
        column("episode_id", TEXT, "Its episode."),
        column("sequence_index", INT32, "From 0, in order."),
        *columns_of(TokenSequence),
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
