"""All recorded tries to play back demonstrations, and the resulting verdicts."""

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import fields
from enum import StrEnum

import duckdb

from osworld_pipeline.domain.digest import digest_json
from osworld_pipeline.domain.episode import Outcome
from osworld_pipeline.domain.grounds import Grounds
from osworld_pipeline.domain.replay import ReplayVerification
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import TableError
from osworld_pipeline.runs.verify_replay.playback import PlayedBack
from osworld_pipeline.runs.verify_replay.playback_plan import Playback
from osworld_pipeline.tables.catalog import first_line
from osworld_pipeline.tables.part_views import create_pinned_views
from osworld_pipeline.tables.replay.rows import former_row_ids


class Verdict(StrEnum):
    VERIFIED = "verified"
    """A playback reached the threshold."""
    FAILED = "failed"
    """The recipe's number of graded playbacks did not reach it."""
    OPEN = "open"


class VerificationRecord:
    """The tries by row, oldest first; a run adds its own."""

    def __init__(self, tries: Iterable[ReplayVerification] = ()) -> None:
        self._by_row: dict[str, dict[str, ReplayVerification]] = defaultdict(dict)
        self.add(sorted(tries, key=lambda one: one.started_at))

    def add(self, tries: Iterable[ReplayVerification]) -> None:
        for one in tries:
            self._by_row[one.row_id][one.verification_id] = one

    def __iter__(self) -> Iterator[ReplayVerification]:
        return (one for tries in self._by_row.values() for one in tries.values())

    @property
    def num_tries(self) -> int:
        return sum(len(tries) for tries in self._by_row.values())

    def next_index(self, playback: Playback) -> int:
        """The index of the next try, from 0. A row never uses an index twice, also after a fault."""
        return max(len(self._by_row.get(row_id, ())) for row_id in playback.row_ids)

    def tries(self, playback: Playback) -> list[ReplayVerification]:
        """The tries of this demonstration, oldest first; of a chunked one those of its first chunk."""
        return list(self._by_row.get(playback.row_ids[0], {}).values())

    def graded(self, playback: Playback, task: Task, grounds: Collection[Grounds] | None) -> list[ReplayVerification]:
        """Graded tries of this demonstration with this exact task, oldest first; under one of `grounds`, or under any
        if it is None."""
        digest = task.config_digest
        return [
            one
            for one in self.tries(playback)
            if one.outcome in (Outcome.SUCCESS, Outcome.FAILURE)
            and one.task_digest == digest
            and (grounds is None or grounds_of(one) in grounds)
        ]

    def verdict(
        self, playback: Playback, task: Task, grounds: Collection[Grounds] | None, *, num_attempts: int
    ) -> Verdict:
        graded = self.graded(playback, task, grounds)
        if any(one.outcome is Outcome.SUCCESS for one in graded):
            return Verdict.VERIFIED
        return Verdict.FAILED if len(graded) >= num_attempts else Verdict.OPEN

    def digest(self) -> str:
        """Digest of the best reward of each row; a new try changes it only if it changes one of these."""
        best: dict[str, float] = {}
        for row_id, tries in self._by_row.items():
            rewards = [one.reward for one in tries.values() if one.reward is not None]
            if rewards:
                best[row_id] = max(rewards)
        return digest_json(best)


def grounds_of(verification: ReplayVerification) -> Grounds:
    return Grounds(image_digest=verification.image_digest, grader_version=verification.grader_version)


def read_record(state: StateDir) -> VerificationRecord:
    """Every try in the store.

    Raises:
        TableError: a part is damaged.
        StoreError: as create_pinned_views.
    """
    names = [field.name for field in fields(ReplayVerification)]
    with duckdb.connect(":memory:") as connection:
        try:
            create_pinned_views(connection, state, "replay_verifications")
            sql = f"SELECT {', '.join(names)} FROM replay_verifications"  # noqa: S608 - our own names
            rows = connection.execute(sql).fetchall()
        except duckdb.Error as error:
            raise TableError(f"cannot read the verifications in {state.trajectories}: {first_line(error)}") from error
    tries = [dict(zip(names, row, strict=True)) for row in rows]
    formerly = former_row_ids(state)
    return VerificationRecord(
        ReplayVerification(**{**one, "outcome": Outcome(one["outcome"]), "row_id": row_id})
        for one in tries
        for row_id in formerly.get(one["row_id"], [one["row_id"]])
    )


def verifications_of(
    playback: Playback, task: Task, played: PlayedBack, *, index: int
) -> tuple[ReplayVerification, ...]:
    """One for each row of the demonstration: all its chunks share the result."""
    return tuple(
        ReplayVerification(
            verification_id=hashlib.sha256(f"{row_id}/{index}".encode()).hexdigest()[:24],
            row_id=row_id,
            task_id=playback.task_id,
            task_digest=task.config_digest,
            outcome=played.outcome,
            reward=played.reward,
            error=played.error,
            num_steps=played.num_steps,
            replica_id=played.info.replica_id,
            provider=played.info.provider,
            image_digest=played.info.image_digest,
            grader_version=played.info.grader_version,
            started_at=played.started_at,
            duration_s=played.duration_s,
        )
        for row_id in playback.row_ids
    )
