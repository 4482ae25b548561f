"""The job of a GSPO phase, and the data that it loads at the start: its tasks, and the checkpoint that it resumes
from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from pydantic import Field

from osworld_pipeline.domain.checkpoint import Stage
from osworld_pipeline.domain.episode import SamplingParams
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import TableError
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.recipes.schema import GspoPhaseSection
from osworld_pipeline.rollout.run_group import GroupPlan
from osworld_pipeline.runs.checkpoints.ids import imitated_tasks
from osworld_pipeline.runs.job import TrainingJob
from osworld_pipeline.runs.rollouts.embedded_server import EnvServers
from osworld_pipeline.runs.rollouts.session import sampling_params
from osworld_pipeline.tables.builds import one_build
from osworld_pipeline.tables.owned import read_table


class GspoJob(TrainingJob):
    """The job of a GSPO phase."""

    servers: EnvServers = Field()  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def phase(self) -> GspoPhaseSection:
        gspo = self.recipe.gspo
        return gspo.phase1 if self.stage is Stage.GSPO_PHASE1 else gspo.phase2

    @property
    def num_planned(self) -> int:
        return self.phase.num_updates

    def group_plan(self, update: int) -> GroupPlan:
        rollout, gspo = self.recipe.rollout, self.recipe.gspo
        return GroupPlan(
            stage_key=self.checkpoint_id,
            update=update,
            group_size=gspo.group_size,
            checkpoint_id=self.checkpoint_id,
            stage=self.stage,
            parent_id=self.parent_id,
            sampling=self.sampling,
            run_ids=self.run_ids,
            min_valid=rollout.min_valid_episodes,
            max_resamples=rollout.max_resamples,
        )

    @property
    def sampling(self) -> SamplingParams:
        return sampling_params(
            self.recipe, temperature=self.phase.temperature, top_p=self.recipe.gspo.top_p, seed=self.phase.seed
        )


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    folder: Path
    """Weights, and the optimiser's state if updates have been made."""
    num_updates: int = 0
    collector: Mapping[str, Any] = field(default_factory=dict)
    """The collector's snapshot."""


def resume_point(job: GspoJob) -> ResumePoint:
    """The newest checkpoint of the stage, or else its parent. Raises StoreError if it is damaged."""
    from osworld_pipeline.training.weights.checkpoint import latest_complete, read_trainer_state

    partial = latest_complete(job.state, job.checkpoint_id)
    if partial is None:
        return ResumePoint(folder=job.parent_folder)
    saved = read_trainer_state(partial)
    return ResumePoint(folder=partial, num_updates=saved.num_updates, collector=saved.extra.get("collector", {}))


def load_train_tasks(state: StateDir) -> list[Task]:
    """The trainable tasks, sorted by id.

    Raises:
        TableError: there are none.
    """
    rows = read_table(state, "train_tasks").to_pylist()
    if not rows:
        raise TableError(f"there are no training tasks in {state.tables}: materialize train_tasks first")
    tasks = [Task.from_config(orjson.loads(row["task_config"]), domain=row["domain"]) for row in rows]
    return sorted(tasks, key=lambda task: task.task_id)


def load_gspo_tasks(state: StateDir, recipe: Recipe) -> list[Task]:
    """The training tasks that `rollout.tasks` selects.

    Raises:
        TableError: there are none.
    """
    with one_build(state):
        tasks = load_train_tasks(state)
        if recipe.rollout.tasks == "all":
            return tasks
        imitated = imitated_tasks(state, recipe)
    left = [task for task in tasks if task.task_id not in imitated]
    if not left:
        raise TableError(
            f"SFT uses demonstrations of all {len(tasks)} training tasks, which leaves none for GSPO: "
            "set sft.task_share below 1, or rollout.tasks to 'all'"
        )
    return left
