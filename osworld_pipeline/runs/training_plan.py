"""Estimates the cost of a training before it starts: stages, episodes, processes, desktops, disk and time. Arithmetic
on a recipe; times come from episodes recorded in this state."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from osworld_pipeline.domain.checkpoint import Stage
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.recipes.schema import GspoPhaseSection
from osworld_pipeline.tables.catalog import fresh_views
from osworld_pipeline.training.memory.model_shapes import ModelShape, shape_of

MASTER_BYTES = 4
"""Bytes of a trained parameter's float32 master in a checkpoint's optimiser state; the two moments need twice as
much."""
NUM_BYTES = {"float32": 4, "bfloat16": 2}
MIN_EPISODES = 10
"""Fewer recorded episodes give no time estimate."""
NUM_RECENT = 1000
_RECENT = """
SELECT times_s['total'] AS total_s FROM episodes
WHERE is_valid AND purpose = 'train' AND times_s['total'] > 0
ORDER BY started_at DESC LIMIT $limit
"""


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    stage: Stage
    num_updates: int
    num_episodes: int
    """Rollouts, without repeated faulty ones and replacement groups."""
    how: str
    """The product that gives the number of episodes, or of SFT examples."""


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    stages: tuple[StagePlan, ...]
    num_processes: int
    """Ranks of the trainer; each uses one GPU if there are GPUs."""
    engine: str
    desktops: str
    num_slots: int
    """Number of concurrent episodes."""
    checkpoint_bytes: int | None
    """Weights and optimiser state of one checkpoint; None if the model's size is unknown."""
    num_checkpoints: int
    """Maximum number of checkpoints kept at the same time."""
    episode_s: float | None
    """Median wall time of this state's latest training episodes; None if there are too few."""

    @property
    def num_episodes(self) -> int:
        return sum(stage.num_episodes for stage in self.stages)

    @property
    def rollout_s(self) -> float | None:
        """Estimate: episodes x median episode time / concurrent episodes."""
        return None if self.episode_s is None else self.num_episodes * self.episode_s / self.num_slots

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"num_episodes": self.num_episodes, "rollout_s": self.rollout_s}


def plan_training(recipe: Recipe, stages: Sequence[Stage], state: StateDir) -> TrainingPlan:
    """
    Raises:
        StoreError: the folder of the recipe's model does not contain its sizes.
        TableError: the episodes of this state cannot be read.
    """
    trained = [stage for stage in stages if stage is not Stage.BASE]
    plans = tuple(plan for stage in trained if (plan := _plan_stage(recipe, stage)) is not None)
    shape = shape_of(recipe.model)
    trainer, desktop = recipe.trainer, recipe.desktop
    is_remote = bool(desktop.server_urls)
    return TrainingPlan(
        stages=plans,
        num_processes=trainer.num_processes,
        engine=f"{recipe.engine.kind} {_place_of_engine(recipe)}",
        desktops=f"{desktop.num_replicas} on {', '.join(desktop.server_urls)}"
        if is_remote
        else f"{desktop.num_replicas} local desktops on this machine",
        num_slots=recipe.rollout.max_concurrent_episodes or desktop.num_replicas,
        checkpoint_bytes=None if shape is None else _checkpoint_bytes(recipe, shape),
        num_checkpoints=sum(_num_kept(recipe, plan) for plan in plans),
        episode_s=_measured_episode_s(state),
    )


def _place_of_engine(recipe: Recipe) -> str:
    if recipe.engine.urls:
        return f"at {', '.join(recipe.engine.urls)}"
    return "in the trainer" if recipe.engine.launch is None else "on servers that the pipeline starts"


def _plan_stage(recipe: Recipe, stage: Stage) -> StagePlan | None:
    """None for a flywheel without rounds."""
    gspo, flywheel, sft = recipe.gspo, recipe.flywheel, recipe.sft
    if stage is Stage.SFT:
        how = f"{sft.num_updates:,} updates x {sft.batch_size} demonstrations"
        return StagePlan(stage=stage, num_updates=sft.num_updates, num_episodes=0, how=how)
    if stage is Stage.FLYWHEEL:
        if not flywheel.num_rounds:
            return None
        num_tasks = flywheel.max_tasks or recipe.suite.num_train
        return StagePlan(
            stage=stage,
            num_updates=flywheel.num_rounds * flywheel.num_updates,
            num_episodes=flywheel.num_rounds * num_tasks * flywheel.samples_per_task,
            how=f"{flywheel.num_rounds} rounds x {num_tasks} tasks x {flywheel.samples_per_task} samples",
        )
    phase: GspoPhaseSection = gspo.phase1 if stage is Stage.GSPO_PHASE1 else gspo.phase2
    return StagePlan(
        stage=stage,
        num_updates=phase.num_updates,
        num_episodes=phase.num_updates * gspo.tasks_per_update * gspo.group_size,
        how=f"{phase.num_updates} updates x {gspo.tasks_per_update} tasks x {gspo.group_size} siblings",
    )


def _num_kept(recipe: Recipe, plan: StagePlan) -> int:
    """Checkpoints of a stage: the final one (of each round of a flywheel), the last ones to resume from, and
    milestones."""
    every = recipe.trainer.keep_every
    num_final = recipe.flywheel.num_rounds if plan.stage is Stage.FLYWHEEL else 1
    return num_final + recipe.trainer.keep_last + (plan.num_updates // every if every else 0)


def _checkpoint_bytes(recipe: Recipe, shape: ModelShape) -> int:
    """Weights in the model's precision, plus a float32 master and two moments of each trained parameter. With LoRA only
    the factors in float32 and their two moments: the base's weights are not stored again."""
    dtype = getattr(recipe.model, "dtype", "float32")
    lora = recipe.trainer.lora
    if lora is not None:
        layers = shape.text.num_layers
        num_trained = sum(
            layers * lora.rank * sum(shape.text.linear_layers[name])
            for name in lora.target_modules
            if name in shape.text.linear_layers
        )
        return num_trained * (MASTER_BYTES + 2 * MASTER_BYTES)
    num_trained = shape.parameters if recipe.trainer.train_vision else shape.text.parameters
    return shape.parameters * NUM_BYTES[dtype] + num_trained * 3 * MASTER_BYTES


def _measured_episode_s(state: StateDir) -> float | None:
    if not state.catalog.is_file():
        return None
    with fresh_views(state, "episodes") as connection:
        rows = connection.execute(_RECENT, {"limit": NUM_RECENT}).fetchall()
    return median(row[0] for row in rows) if len(rows) >= MIN_EPISODES else None
