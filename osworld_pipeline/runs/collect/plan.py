"""Plans the episodes of a collection: `num_samples` episodes of each task. Needs no torch.

The episodes count as training rollouts, so that `replay` and the exports find their successes. A collection with more
tasks or samples contains the episodes of a smaller one, which are not run again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from osworld_pipeline.domain.digest import digest_json
from osworld_pipeline.domain.episode import Episode
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import DatasetError
from osworld_pipeline.evaluation.suite_files import HELDOUT, EvalSuite, first_tasks
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.rollout.run_group import GroupPlan, plan_episode
from osworld_pipeline.runs.checkpoints.ids import DIGEST_LENGTH, evaluation_key, recipe_suite
from osworld_pipeline.runs.evaluate.plan import TaskChoice, load_tasks
from osworld_pipeline.runs.job import DesktopJob, Policy
from osworld_pipeline.runs.placement import Placement
from osworld_pipeline.runs.rollouts.session import sampling_params
from osworld_pipeline.store import TrajectoryStore

TRAIN = "train"
"""The training tasks of the recipe's own suite."""
ORACLE = "oracle"
"""Takes the place of a checkpoint id: scripts that solve the recipe's own tasks."""
OUTSIDE_TRAINING = -1


@dataclass(frozen=True, kw_only=True)
class CollectionPlan:
    """Groups of sibling episodes, one for each task."""

    stage_key: str
    groups: tuple[tuple[Task, GroupPlan, str], ...]

    @property
    def episode_ids(self) -> tuple[str, ...]:
        return tuple(
            plan_episode(plan, group_id, sample).episode_id
            for _, plan, group_id in self.groups
            for sample in range(plan.group_size)
        )

    def episodes(self, state: StateDir) -> list[Episode]:
        """The episodes that have been run, including faults."""
        return [found[0] for found in TrajectoryStore(state).read_parts(self.episode_ids).values()]


class CollectionJob(DesktopJob):
    checkpoint: Policy
    """The policy; `oracle` uses only its id."""
    tasks: TaskChoice = TaskChoice()
    num_samples: int
    temperature: float

    @property
    def placement(self) -> Placement:
        """It samples, unless actors do."""
        return Placement.ROLLOUTS


def load_collected(state: StateDir, recipe: Recipe, choice: TaskChoice) -> EvalSuite:
    """Does the same as load_tasks, with the additional suite `train`. Raises DatasetError."""
    if choice.suite != TRAIN or choice.tasks_file:
        return load_tasks(state, recipe, choice)
    suite = recipe_suite(recipe)
    tasks, origin = tuple(item.task for item in suite.train), recipe.suite.name.replace("_", "-")
    whole = EvalSuite(name=TRAIN, tasks=tasks, digest=suite.digest, origin=origin)
    return whole if choice.max_tasks is None else first_tasks(whole, choice.max_tasks)


def plan_collection(
    recipe: Recipe,
    checkpoint_id: str,
    suite: EvalSuite,
    *,
    num_samples: int,
    temperature: float,
    run_ids: Mapping[str, str] | None = None,
    stage: str = "",
) -> CollectionPlan:
    """`checkpoint_id`: may be `oracle`. `stage`: stage of the checkpoint."""
    settings = {
        "episode": evaluation_key(recipe, suite_digest=""),
        "max_turns": recipe.agent.max_turns,
        "temperature": temperature,
        "top_p": recipe.gspo.top_p,
    }
    stage_key = f"collect-{checkpoint_id}-{digest_json(settings)[:DIGEST_LENGTH]}"
    plan = GroupPlan(
        stage_key=stage_key,
        update=OUTSIDE_TRAINING,
        group_size=num_samples,
        checkpoint_id=checkpoint_id,
        sampling=sampling_params(recipe, temperature=temperature, top_p=recipe.gspo.top_p, seed=0),
        run_ids=dict(run_ids or {}),
        stage=stage,
    )
    # A changed task keeps its id; episodes of the old version must not count for the new one.
    groups = tuple(
        (task, plan, f"{stage_key}-{suite.id_of(task)}-{task.config_digest[:DIGEST_LENGTH]}") for task in suite.tasks
    )
    return CollectionPlan(stage_key=stage_key, groups=groups)


def holds_back(recipe: Recipe, suite: EvalSuite) -> int:
    """How many of the suite's tasks the recipe holds out. Training on them makes their evaluation meaningless."""
    heldout = {item.task.task_id for item in recipe_suite(recipe).heldout}
    return sum(task.task_id in heldout for task in suite.tasks)


def require_oracles(recipe: Recipe, tasks: Sequence[Task]) -> None:
    """
    Raises:
        DatasetError: one of the tasks does not belong to the recipe's own suite, so it has no script.
    """
    suite = recipe_suite(recipe)
    known = {item.task.task_id: item.task.config_digest for item in (*suite.train, *suite.heldout)}
    strange = [task.task_id for task in tasks if known.get(task.task_id) != task.config_digest]
    if strange:
        raise DatasetError(
            f"there is no oracle for task {strange[0]}: scripts exist only for the recipe's own tasks "
            f"(--suite {TRAIN} or --suite {HELDOUT})"
        )
