"""Records of a training stage's program: each of its starts, and each of its updates."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from osworld_pipeline.domain.checkpoint import milestone_id


class AttemptStatus(StrEnum):
    RUNNING = "running"
    """Also the status that a killed program leaves."""
    FINISHED = "finished"
    STOPPED = "stopped"
    """Ended early: its budget is spent, it received a signal, or there is no data to train on."""
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class TrainingStage:
    """A stage that is being trained, as its records name it."""

    stage_key: str
    """The id of the checkpoint that the stage makes."""
    stage: str
    parent_id: str
    num_planned: int
    """Updates of the whole stage."""
    run_ids: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StageAttempt:
    attempt_id: str
    stage: TrainingStage
    first_update: int
    """From 1; above 1 if the stage was resumed."""
    host: str
    process_id: int
    started_at: float
    """Unix time."""
    status: AttemptStatus = AttemptStatus.RUNNING
    error: str | None = None
    ended_at: float | None = None
    """Unix time."""


@dataclass(frozen=True, kw_only=True)
class UpdateRecord:
    stage: TrainingStage
    update: int
    """From 1."""
    metrics: Mapping[str, float]
    """By their names in MLflow."""
    started_at: float
    """Unix time, like the next."""
    ended_at: float

    @property
    def weights_id(self) -> str:
        """The name of the weights after it, whether or not they are kept."""
        return milestone_id(self.stage.stage_key, self.update)
