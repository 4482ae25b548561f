"""Replay: recorded successes that can be used again, the results of re-executing them, and the groups they join."""

import re
from dataclasses import dataclass, fields
from typing import Annotated, Literal

from osworld_pipeline.domain.episode import Outcome
from osworld_pipeline.domain.stored import SECONDS, SHARE, UNIX_TIME, Stored

ReplayKind = Literal["demonstration", "episode"]
"""`demonstration`: a row of the replay buffer, as chat turns. `episode`: an online success, with its sampled tokens."""

_CHUNK = re.compile(r"(.+)_chunk\d+", re.DOTALL)


def base_task_id(task_id: str) -> str:
    """Slime-OSWorld cuts a long demonstration into chunks: the id before the last `_chunk<n>`, else the id itself."""
    match = _CHUNK.fullmatch(task_id)
    return match[1] if match else task_id


@dataclass(frozen=True, kw_only=True)
class ReplayRow:
    """A successful trajectory used again; its users keep `source_*` and `licence` (provenance)."""

    row_id: str
    """The key of the `replay` view: for a demonstration the digest of task and turns, for an episode its id."""
    task_id: str
    """The base id."""
    original_task_id: str
    """The id with the chunk's number, if it is a chunk."""
    source_dataset: str
    """`online` for an episode."""
    reward: float
    messages: tuple[dict, ...] = ()
    """Chat turns, whose content is always a list of {type: text|image}; empty for an episode."""
    dialect: str = "slime"
    """The dialect of its turns."""
    image_sha256s: tuple[str, ...] = ()
    """Blobs in placeholder order."""
    kind: ReplayKind = "demonstration"
    verified_reward: float | None = None
    """Best reward of re-executing it, or an episode's own reward; None without a grader's score."""
    source_path: str | None = None
    """The file of the record; None for an episode."""
    source_line: int | None = None
    source_sha256: str | None = None
    """SHA-256 of the bytes of that line."""
    licence: str | None = None

    @property
    def is_online(self) -> bool:
        return self.kind == "episode"


@dataclass(frozen=True, kw_only=True)
class TrainedRow:
    """A replay row that a checkpoint was fine-tuned on, with its origin, because the replay buffer may lose the row."""

    row_id: str
    kind: ReplayKind
    task_id: str
    source_dataset: str
    source_path: str | None = None
    source_line: int | None = None
    source_sha256: str | None = None
    licence: str | None = None

    @classmethod
    def of(cls, row: ReplayRow) -> "TrainedRow":
        return cls(**{field.name: getattr(row, field.name) for field in fields(cls)})


@dataclass(frozen=True, kw_only=True)
class ReplayVerification:
    """One re-execution of a demonstration's actions on a fresh desktop."""

    verification_id: Annotated[
        str, Stored("One re-execution: deterministic id from row and attempt; a rerun replaces the row.")
    ]
    row_id: Annotated[str, Stored("The row of `replay`.")]
    task_id: Annotated[str, Stored("Its task.")]
    task_digest: Annotated[str, Stored("SHA-256 of the task's config.")]
    outcome: Annotated[Outcome, Stored("success or failure by the grader's score; else a fault, timeout or touched.")]
    reward: Annotated[float | None, Stored("The grader's score; NULL if and only if there is none.", SHARE)] = None
    error: Annotated[str | None, Stored("Why it has no score, or the first action that the desktop refused.")] = None
    num_steps: Annotated[int, Stored("Actions executed.", bits=32)] = 0
    replica_id: Annotated[str, Stored("The desktop it ran on.")] = ""
    provider: Annotated[str, Stored("Provider of the desktop.")] = ""
    image_digest: Annotated[str, Stored("Digest of the desktop's image.")] = ""
    grader_version: Annotated[str, Stored("Version of the evaluators.")] = ""
    started_at: Annotated[float, Stored("Start time.", UNIX_TIME)] = 0.0
    duration_s: Annotated[float, Stored("Duration.", SECONDS)] = 0.0


@dataclass(frozen=True, kw_only=True)
class Injection:
    """A replay row that joined a rollout group, with its reward, advantage and weight there."""

    injection_id: Annotated[str, Stored("One replay row in one group.")]
    group_id: Annotated[str, Stored("The group that it joined.")]
    row_id: Annotated[str, Stored("The row of `replay`.")]
    task_id: Annotated[str, Stored("Task of both.")]
    source_dataset: Annotated[str, Stored("Source of the row; online for an episode.")]
    reward: Annotated[float, Stored("The reward with which it counted.", SHARE)]
    advantage: Annotated[float, Stored("The advantage with which it counted.")]
    weight: Annotated[float, Stored("Factor of its loss.")]
    kind: Annotated[ReplayKind, Stored("demonstration or episode.")] = "demonstration"
    strategy: Annotated[str, Stored("Strategy that chose it among its task's rows.")] = "uniform"
    verified_reward: Annotated[
        float | None,
        Stored(
            "Best reward of re-executing it until then, or an episode's own reward; NULL without a grader's score.",
            SHARE,
        ),
    ] = None
    source_path: Annotated[str | None, Stored("The file of the row at that time; NULL for an episode.")] = None
    source_line: Annotated[int | None, Stored("The line in that file, from 1.")] = None
    source_sha256: Annotated[str | None, Stored("SHA-256 of the bytes of that line.")] = None
    licence: Annotated[str | None, Stored("Licence of the source.")] = None
