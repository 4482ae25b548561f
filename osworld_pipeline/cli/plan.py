"""Whether this machine can train a recipe, and the plan of that training: stages, episodes, processes, disk and time.
`train --dry-run` and `doctor --role trainer` print it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from osworld_pipeline.cli.shown import counted
from osworld_pipeline.domain.checkpoint import Stage

if TYPE_CHECKING:
    from osworld_pipeline.recipes import Recipe
    from osworld_pipeline.runs.training_plan import TrainingPlan
    from osworld_pipeline.training.memory.fit import Fit

GB = 1e9
EVERY_STAGE = (Stage.SFT, Stage.FLYWHEEL, Stage.GSPO_PHASE1, Stage.GSPO_PHASE2)
"""The stages of a plan if none are chosen; the stage base is not one of them."""


@dataclass(frozen=True, kw_only=True)
class Readiness:
    recipe: "Recipe"
    start: str
    """The checkpoint to train, as named; empty for the base model of the recipe."""
    plan: "TrainingPlan | None"
    """None if not requested."""
    fit: "Fit | None"
    """None if the size of the recipe's model is unknown."""
    lack: str
    """A sentence about missing GPUs; empty if none is missing, or the plan is for another machine."""

    @property
    def is_ok(self) -> bool:
        return not self.lack and (self.fit is None or self.fit.is_ok)

    def as_json(self) -> dict[str, Any]:
        plan = {} if self.plan is None else {"from": self.start or None, "plan": self.plan.as_json()}
        fit = None if self.fit is None else self.fit.as_json()
        return {"recipe": self.recipe.name, **plan, "fit": fit, "lacks": self.lack or None}

    def show(self, console: Console) -> None:
        from osworld_pipeline.doctor.recipe_fit import show_fit

        if self.plan is not None:
            _print_plan(self.recipe, self.start, self.plan, console)
        if self.fit is None:
            console.print("Memory: the size of the recipe's model is unknown; set model.path to its folder.")
        else:
            show_fit(self.fit, console)
        if self.lack:
            console.print(f"[red]{self.lack}[/]", highlight=False, soft_wrap=True)


def judge_readiness(
    recipe: "Recipe",
    state: Path,
    *,
    gpu_memory: float | None,
    has_plan: bool,
    stages: Sequence[Stage] = EVERY_STAGE,
    start: str = "",
) -> Readiness:
    """`gpu_memory`: GB of a GPU of another machine. `stages`: those of the plan.

    Raises:
        StoreError: the folder of the recipe's model lacks its sizes.
        TableError: the episodes of this state cannot be read.
    """
    from osworld_pipeline.doctor.recipe_fit import judge_recipe, lack_of_gpus
    from osworld_pipeline.domain.state import StateDir
    from osworld_pipeline.runs.training_plan import plan_training
    from osworld_pipeline.training.memory.model_shapes import shape_of

    return Readiness(
        recipe=recipe,
        start=start,
        plan=plan_training(recipe, stages, StateDir(state.resolve())) if has_plan else None,
        fit=None if shape_of(recipe.model) is None else judge_recipe(recipe, gpu_gb=gpu_memory),
        lack=lack_of_gpus(recipe) if gpu_memory is None else "",
    )


def _print_plan(recipe: "Recipe", start: str, plan: "TrainingPlan", console: Console) -> None:
    table = Table(title=f"recipe {recipe.name}", title_justify="left", box=None, pad_edge=False)
    for name in ("stage", "updates", "episodes", "how"):
        table.add_column(name, justify="right" if name in ("updates", "episodes") else "left")
    for stage in plan.stages:
        table.add_row(str(stage.stage), f"{stage.num_updates:,}", f"{stage.num_episodes:,}", stage.how)
    console.print(table)
    ranks = "1 process" if plan.num_processes == 1 else f"{plan.num_processes} processes"
    lines = [
        f"starts from: {start or 'the base model of the recipe'}",
        f"trainer: {ranks}, one GPU each if available; engine: {plan.engine}",
        f"desktops: {plan.desktops}; {counted(plan.num_slots, 'episode')} at once",
        _disk_line(plan),
        _time_line(plan),
    ]
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def _disk_line(plan: "TrainingPlan") -> str:
    if plan.checkpoint_bytes is None:
        return "disk: unknown, because the size of the model is unknown"
    each, total = plan.checkpoint_bytes / GB, plan.checkpoint_bytes * plan.num_checkpoints / GB
    return f"disk (estimate): {plan.num_checkpoints} checkpoints x {each:.2f} GB = {total:.1f} GB, and screenshots"


def _time_line(plan: "TrainingPlan") -> str:
    if plan.episode_s is None or plan.rollout_s is None:
        return "rollouts: no time estimate, because this state has too few training episodes"
    return (
        f"rollouts (estimate): {plan.num_episodes:,} episodes x {plan.episode_s:.1f} s (median of this state) / "
        f"{plan.num_slots} at once = {plan.rollout_s / 60:.0f} minutes, without the updates"
    )
