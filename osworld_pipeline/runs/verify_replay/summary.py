"""The result of a verification, in a file next to the tables: counts, failed demonstrations, demonstrations that cannot
be verified and why, and how many training tasks have a verified demonstration."""

import json
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass

from osworld_pipeline.atomic_io import write_file
from osworld_pipeline.domain.digest import digest_json
from osworld_pipeline.domain.grounds import Grounds
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.runs.checkpoints.ids import training_data_digest
from osworld_pipeline.runs.code_version import code_version
from osworld_pipeline.runs.verify_replay.playback_plan import Playback, PlaybackPlan, chosen_playbacks
from osworld_pipeline.runs.verify_replay.record import Verdict, VerificationRecord
from osworld_pipeline.tables.replay.rows import ReplayCoverage

SUMMARY = "verified_replay.json"
MODULES = tuple(
    f"osworld_pipeline.runs.verify_replay.{name}" for name in ("playback", "playback_plan", "verify_replay")
)
"""Our modules that determine a playback."""


@dataclass(frozen=True, kw_only=True)
class FailedDemonstration:
    row_id: str
    task_id: str
    source: str
    """Source, file and line."""
    earned: tuple[float, ...]
    """The grader's score of each graded playback."""
    error: str | None
    """The action that the desktop refused in the last graded playback, if any."""


@dataclass(frozen=True, kw_only=True)
class VerificationSummary:
    num_rows: int
    """Rows of the replay buffer."""
    num_demonstrations: int
    """Demonstrations that can be verified; a chunked one counts once."""
    num_chosen: int
    """Number of them that the recipe selects."""
    num_verified: int
    num_failed: int
    num_open: int
    """Selected and without a verdict: no success, and too few graded playbacks for a failure."""
    num_faults: int
    """Playbacks of the selected ones, in this or an earlier run, that ended without a grader's score."""
    num_tasks: int
    coverage: float
    """Share of the training tasks with a demonstration."""
    verified_coverage: float
    """Share of the training tasks with a verified demonstration."""
    failed: tuple[FailedDemonstration, ...]
    unplayable: Mapping[str, tuple[str, ...]]
    """Row ids by the reason why they cannot be verified."""
    digest: str
    """Digest of the best recorded reward of each row."""
    key: str = ""
    """Digest of everything that determines the verdicts, including desktops and graders; empty if only their servers
    know these."""

    @property
    def num_unplayable(self) -> int:
        return sum(len(rows) for rows in self.unplayable.values())


def summarise(
    plan: PlaybackPlan,
    record: VerificationRecord,
    grounds: Collection[Grounds] | None,
    *,
    recipe: Recipe,
    coverage: ReplayCoverage,
    key: str = "",
) -> VerificationSummary:
    """`grounds`: as in Verifier. `coverage`: of the training tasks. `key`: as verification_key's."""
    chosen = chosen_playbacks(plan, recipe)
    num_attempts = recipe.replay.num_verification_attempts

    def verdict(playback: Playback) -> Verdict:
        return record.verdict(playback, plan.tasks[playback.task_id], grounds, num_attempts=num_attempts)

    verdicts = {playback.key: verdict(playback) for playback in chosen}
    count = Counter(verdicts[playback.key] for playback in chosen)
    failed = [playback for playback in chosen if verdicts[playback.key] is Verdict.FAILED]
    num_faults = sum(not one.outcome.is_valid for playback in chosen for one in record.tries(playback))
    return VerificationSummary(
        num_rows=sum(len(playback.row_ids) for playback in plan.playbacks) + plan.num_unplayable,
        num_demonstrations=len(plan.playbacks),
        num_chosen=len(chosen),
        num_verified=count[Verdict.VERIFIED],
        num_failed=count[Verdict.FAILED],
        num_open=count[Verdict.OPEN],
        num_faults=num_faults,
        num_tasks=coverage.num_tasks,
        coverage=coverage.share,
        verified_coverage=coverage.verified_share,
        failed=tuple(_failed(playback, plan, record, grounds) for playback in failed),
        unplayable=plan.unplayable,
        digest=record.digest(),
        key=key,
    )


def verification_key(state: StateDir, recipe: Recipe, *, desktops: str | None) -> str:
    """Digest of everything that determines the verdicts. `desktops`: identifies desktops and graders; None if only
    their servers know it, which gives an empty key."""
    if desktops is None:
        return ""
    return digest_json(
        {
            "data": training_data_digest(state, ["replay_buffer", "train_tasks"]),
            "replay": recipe.replay.digest,
            "desktop": recipe.desktop.digest,
            "desktops": desktops,
            "code": code_version(*MODULES),
        }
    )


def settled_summary(state: StateDir, key: str) -> VerificationSummary | None:
    """The last summary, if `key` shows that another verification would play nothing."""
    summary = read_summary(state)
    return summary if summary is not None and key and summary.key == key and not summary.num_open else None


def write_summary(state: StateDir, summary: VerificationSummary) -> None:
    """Raises StoreError."""
    write_file(state.tables / SUMMARY, json.dumps(asdict(summary), indent=1).encode())


def read_summary(state: StateDir) -> VerificationSummary | None:
    """None if nothing has been verified yet."""
    path = state.tables / SUMMARY
    if not path.is_file():
        return None
    fields = json.loads(path.read_text())
    fields["failed"] = tuple(FailedDemonstration(**{**one, "earned": tuple(one["earned"])}) for one in fields["failed"])
    fields["unplayable"] = {reason: tuple(rows) for reason, rows in fields["unplayable"].items()}
    return VerificationSummary(**fields)


def _failed(
    playback: Playback, plan: PlaybackPlan, record: VerificationRecord, grounds: Collection[Grounds] | None
) -> FailedDemonstration:
    graded = record.graded(playback, plan.tasks[playback.task_id], grounds)
    return FailedDemonstration(
        row_id=playback.row_ids[0],
        task_id=playback.task_id,
        source=playback.source,
        earned=tuple(one.reward for one in graded if one.reward is not None),
        error=graded[-1].error,
    )
