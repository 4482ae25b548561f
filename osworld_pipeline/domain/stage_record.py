"""Records of a training stage's program: each of its starts, and each of its updates."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from osworld_pipeline.domain.checkpoint import milestone_id
from osworld_pipeline.domain.stored import UTC, Stored


class AttemptStatus(StrEnum):
    RUNNING = "running"
    """A killed program leaves this status, too."""
    FINISHED = "finished"
    STOPPED = "stopped"
    """Ended early: its budget is spent, it received a signal, or there is no data to train on."""
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class TrainingStage:
    """A stage that is being trained, as its records name it."""

    stage_key: Annotated[str, Stored("The checkpoint being trained.")]
    stage: Annotated[str, Stored("sft, flywheel, gspo_phase1 or gspo_phase2.")]
    parent_id: Annotated[str, Stored("The checkpoint that the stage started from.")]
    num_planned: Annotated[int, Stored("Updates of the whole stage.", bits=32)]
    run_ids: Annotated[Mapping[str, str], Stored("Runs in Dagster and MLflow, by system.")] = field(
        default_factory=dict
    )


@dataclass(frozen=True, kw_only=True)
class StageAttempt:
    attempt_id: Annotated[str, Stored("One start of a stage's program.")]
    stage: TrainingStage
    first_update: Annotated[
        int, Stored("The first update of this attempt, from 1; above 1 the stage was resumed.", bits=32)
    ]
    status: Annotated[
        AttemptStatus,
        Stored(
            "running, finished, stopped (by its budget, a signal, or lack of data) or failed. A killed program "
            "leaves running."
        ),
    ] = AttemptStatus.RUNNING
    error: Annotated[str | None, Stored("Why it stopped or failed, in one sentence.")] = None
    host: Annotated[str, Stored("Host name.")]
    process_id: Annotated[int, Stored("Process id on the host.")]
    started_at: Annotated[float, Stored("When the program started.", UTC, name="started_utc")]
    """Unix time, like the next."""
    ended_at: Annotated[float | None, Stored("When it ended; NULL while it runs.", UTC, name="ended_utc")] = None


@dataclass(frozen=True, kw_only=True)
class UpdateRecord:
    stage: TrainingStage
    update: Annotated[int, Stored("Number of the update in its stage, from 1.", bits=32)]
    metrics: Annotated[Mapping[str, float], Stored("All figures of the update, by their names in MLflow.")]
    started_at: Annotated[float, Stored("When it started to collect its batch.", UTC, name="started_utc")]
    """Unix time, like the next."""
    ended_at: Annotated[float, Stored("When its weights were ready.", UTC, name="ended_utc")]

    @property
    def weights_id(self) -> str:
        """The name of the weights after it, whether or not they are kept."""
        return milestone_id(self.stage.stage_key, self.update)
