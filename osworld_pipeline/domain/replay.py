"""Replay: a recorded success that can be used again, what re-executing it really earned, and its joining of a group."""

import re
from dataclasses import dataclass, fields
from typing import Literal

from osworld_pipeline.domain.episode import Outcome

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
    """With the chunk's number, if it is a chunk."""
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
    """Best reward of re-executing it; None without a grader's score."""
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

    verification_id: str
    """Deterministic id from row and attempt, so that a rerun replaces it instead of adding a duplicate."""
    row_id: str
    task_id: str
    task_digest: str
    outcome: Outcome
    """`success` or `failure` by the grader's score; a fault is not a result for the demonstration."""
    reward: float | None = None
    """The grader's score in 0..1; None if and only if there is none."""
    error: str | None = None
    num_steps: int = 0
    """Actions executed."""
    replica_id: str = ""
    provider: str = ""
    image_digest: str = ""
    grader_version: str = ""
    started_at: float = 0.0
    """Unix time."""
    duration_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Injection:
    """A replay row that joined a rollout group, with its reward, advantage and weight there."""

    injection_id: str
    group_id: str
    row_id: str
    task_id: str
    source_dataset: str
    reward: float
    advantage: float
    weight: float
    kind: ReplayKind = "demonstration"
    strategy: str = "uniform"
    """Strategy that chose it among its task's rows."""
    verified_reward: float | None = None
    source_path: str | None = None
    """As in the row, like the next three."""
    source_line: int | None = None
    source_sha256: str | None = None
    licence: str | None = None
