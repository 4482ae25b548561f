"""The inputs of programs. The side that starts a program makes the model; it travels as JSON to the program's standard
input, because it may contain tokens, and is validated there."""

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from osworld_pipeline.domain.checkpoint import Checkpoint, Stage
from osworld_pipeline.domain.stage_record import TrainingStage
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.runs.budget import UNLIMITED, Budget
from osworld_pipeline.runs.placement import Placement, RayShare
from osworld_pipeline.runs.rollouts.embedded_server import EnvServers
from osworld_pipeline.tracking.code import CodeOrigin, code_origin


class _Input(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Policy(_Input):
    """A checkpoint that is sampled from, or trained further."""

    checkpoint_id: str
    stage: str = ""
    path: str = ""
    """Relative to the state folder, absolute, or the address of an endpoint; empty if the recipe's engine has its own
    weights."""
    run_ids: Mapping[str, str] = Field(default_factory=dict)

    @classmethod
    def of(cls, checkpoint: Checkpoint, run_ids: Mapping[str, str] | None = None) -> "Policy":
        return cls(
            checkpoint_id=checkpoint.checkpoint_id,
            stage=str(checkpoint.stage),
            path=checkpoint.path,
            run_ids=run_ids or {},
        )


class Job(_Input):
    """What every program needs."""

    recipe: Recipe
    state_root: Path
    state_name: str = ""
    """See StateDir.name."""
    run_ids: Mapping[str, str] = Field(default_factory=dict)
    parent_pid: int | None = None
    """The program ends when this process ends; set by the launcher."""
    ray: RayShare | None = None
    """Set by Ray's launcher."""

    @property
    def state(self) -> StateDir:
        return StateDir(self.state_root, self.state_name)

    @property
    def placement(self) -> Placement:
        """What the program computes in its own process."""
        return Placement.DRIVER

    @property
    def actors(self) -> RayShare | None:
        """The share of a cluster whose actors run the episodes; None if the program runs them."""
        return self.ray if self.ray is not None and self.ray.num_rollout_actors else None


class DesktopJob(Job):
    """The job of a program that runs episodes."""

    servers: EnvServers
    engine_token: str | None = Field(default=None, repr=False)
    """Token of the engine's servers, if they require one."""


class StageJob(Job):
    """The job of a program that makes a checkpoint."""

    stage: Stage
    checkpoint_id: str
    parent: Policy | None = None
    data_digest: str
    servers: EnvServers | None = None
    """None for a stage without episodes."""
    engine_token: str | None = Field(default=None, repr=False)
    budget: Budget = UNLIMITED
    """The remaining budget at the start of the program."""
    resume: bool = True

    @property
    def placement(self) -> Placement:
        """Every stage trains, except the base."""
        return Placement.DRIVER if self.stage is Stage.BASE else Placement.RANK


class TrainingJob(StageJob):
    """The job of a program that trains a checkpoint. It and its subclasses make optional fields required. This narrower
    type is safe, because models are frozen."""

    parent: Policy = Field()  # pyright: ignore[reportIncompatibleVariableOverride]
    _code: CodeOrigin = PrivateAttr(default_factory=code_origin)

    @property
    def parent_id(self) -> str:
        return self.parent.checkpoint_id

    @property
    def parent_folder(self) -> Path:
        return self.state.root / self.parent.path

    @property
    @abstractmethod
    def num_planned(self) -> int:
        """Updates of the whole stage."""

    @property
    def training_stage(self) -> TrainingStage:
        return TrainingStage(
            stage_key=self.checkpoint_id,
            stage=self.stage,
            parent_id=self.parent_id,
            num_planned=self.num_planned,
            run_ids=self.run_ids,
        )

    @property
    def code(self) -> CodeOrigin:
        """The code when the program started."""
        return self._code
