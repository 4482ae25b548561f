"""Checkpoints without weights, and evaluations of them that were never run."""

import json
from collections.abc import Mapping
from typing import Any

from episode_samples import make_episode

from osworld_pipeline.domain.checkpoint import Checkpoint, Stage
from osworld_pipeline.domain.episode import Outcome, Reward
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes import Recipe, load_recipe
from osworld_pipeline.runs.checkpoints.ids import CARD, checkpoint_card
from osworld_pipeline.runs.evaluate.plan import plan_evaluation
from osworld_pipeline.store import TrajectoryStore


def make_checkpoint(checkpoint_id: str, stage: Stage = Stage.SFT, **changes: Any) -> Checkpoint:
    fields: Mapping[str, Any] = {
        "checkpoint_id": checkpoint_id,
        "stage": stage,
        "parent_id": None,
        "path": f"checkpoints/{checkpoint_id}",
        "num_updates": 4,
        "recipe_digest": "r",
        "data_digest": "d",
        "weights_digest": f"weights of {checkpoint_id}",
    }
    return Checkpoint(**{**fields, **changes})


CHAIN = (Stage.BASE, Stage.SFT, Stage.GSPO_PHASE1, Stage.GSPO_PHASE2)


def trained_with(stage: Stage, seed: int, parent: str | None, **settings: Any) -> Checkpoint:
    """A checkpoint, and its card, of the recipe `demo` with this seed for everything that is trained."""
    seeded = dict.fromkeys(("model.seed", "sft.seed", "gspo.phase1.seed", "gspo.phase2.seed"), seed)
    changes = [f"{key}={json.dumps(value)}" for key, value in {**seeded, **settings}.items()]
    # All tasks, because the seed would draw a share of them.
    recipe = load_recipe("demo", settings=["sft.task_share=1.0", *changes]).model_dump(mode="json")
    return make_checkpoint(f"{stage}-{seed:012x}", stage, parent_id=parent, recipe=recipe)


def chain_of(*stages: Stage) -> list[Checkpoint]:
    """Checkpoints that are each the parent of the next one, named after their stages."""
    return [
        make_checkpoint(str(stage), stage, parent_id=str(stages[place - 1]) if place else None)
        for place, stage in enumerate(stages)
    ]


def lay_down(state: StateDir, *checkpoints: Checkpoint) -> None:
    """Writes the folders of the checkpoints, as a trainer leaves them."""
    for checkpoint in checkpoints:
        folder = state.root / checkpoint.path
        folder.mkdir(parents=True)
        (folder / CARD).write_text(json.dumps(checkpoint_card(checkpoint)))


def write_evaluation(
    state: StateDir, recipe: Recipe, checkpoint_id: str, *, num_successes: int, num_faults: int = 0, **changes: Any
) -> None:
    """The first `num_successes` planned episodes succeed, the last `num_faults` end in a fault, the others fail."""
    plan = plan_evaluation(recipe, checkpoint_id)
    store = TrajectoryStore(state)
    num_valid = len(plan.episodes) - num_faults
    for number, (part, (task, planned)) in enumerate(plan.episodes.items()):
        is_success, is_valid = number < num_successes, number < num_valid
        outcome = Outcome.SUCCESS if is_success else Outcome.FAILURE if is_valid else Outcome.ENV_FAULT
        episode = make_episode(
            planned.episode_id,
            task_id=task.task_id,
            checkpoint_id=checkpoint_id,
            seed=planned.seed,
            stage_key=plan.stage_key,
            outcome=outcome,
            reward=Reward(task=float(is_success), shaped=float(is_success)) if is_valid else None,
            error=None if is_valid else "gone",
            **changes,
        )
        store.write_episodes(part, [episode])
