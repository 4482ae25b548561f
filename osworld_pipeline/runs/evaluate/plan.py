"""Plans the evaluation of a checkpoint and finds which of its episodes are done. Needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from osworld_pipeline.domain.episode import Episode, EpisodePurpose
from osworld_pipeline.domain.near_names import did_you_mean
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import DatasetError
from osworld_pipeline.evaluation.suite_files import (
    HELDOUT,
    OSWORLD_SUITES,
    EvalSuite,
    first_tasks,
    read_osworld_suite,
    read_suite_file,
    suite_names,
)
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.rollout.attempt import derive_seed
from osworld_pipeline.rollout.run_episode import EpisodePlan
from osworld_pipeline.runs.checkpoints.ids import EVALUATION_TOP_P, evaluation_key, recipe_suite
from osworld_pipeline.runs.job import DesktopJob, Policy
from osworld_pipeline.runs.placement import Placement
from osworld_pipeline.runs.rollouts.session import sampling_params
from osworld_pipeline.store import TrajectoryStore


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """One episode for each task of the suite and each seed; each is stored as a separate part with its name."""

    key: str
    """Key of the settings; evaluations with the same key are comparable."""
    stage_key: str
    suite_digest: str
    episodes: Mapping[str, tuple[Task, EpisodePlan]]
    """Episodes by part name."""

    def finished(self, state: StateDir) -> dict[str, Episode]:
        """The episodes that need not run again, by part name. Faults are run again."""
        store = TrajectoryStore(state)
        episodes = {part: found[0] for part, found in store.read_parts(tuple(self.episodes)).items()}
        return {part: episode for part, episode in episodes.items() if episode.outcome.is_valid}


@dataclass(frozen=True, kw_only=True)
class TaskChoice:
    """The chosen tasks: a suite by name or a file; all its tasks or the first ones."""

    suite: str = HELDOUT
    tasks_file: str = ""
    """A file in the format of a suite; overrides `suite`."""
    max_tasks: int | None = None


class EvaluationJob(DesktopJob):
    checkpoints: tuple[Policy, ...]
    tasks: TaskChoice = TaskChoice()

    @property
    def placement(self) -> Placement:
        """It samples, unless actors do."""
        return Placement.ROLLOUTS


def load_tasks(state: StateDir, recipe: Recipe, choice: TaskChoice) -> EvalSuite:
    """Raises DatasetError, as load_suite."""
    named = Path(choice.tasks_file) if choice.tasks_file else None
    suite = load_suite(state, recipe, choice.suite) if named is None else read_suite_file(named)
    return suite if choice.max_tasks is None else first_tasks(suite, choice.max_tasks)


def load_suite(state: StateDir, recipe: Recipe, name: str) -> EvalSuite:
    """The suite of that name: the recipe's held-out tasks, one of OSWorld's, or a file of the user's.

    Raises:
        DatasetError: there is no suite of that name, or it cannot be read.
    """
    if name == HELDOUT:
        return heldout_suite(recipe)
    if name in OSWORLD_SUITES:
        return read_osworld_suite(name, state.osworld_repo)
    names = suite_names(state.suites)
    if name not in names:
        raise DatasetError(
            f"no suite '{name}': there are {', '.join(names)}; put your own into {state.suites}"
            f"{did_you_mean(name, names)}"
        )
    return read_suite_file(state.suites / f"{name}.json")


def heldout_suite(recipe: Recipe) -> EvalSuite:
    suite = recipe_suite(recipe)
    tasks = tuple(item.task for item in suite.heldout)
    return EvalSuite(name=HELDOUT, tasks=tasks, digest=suite.digest, origin=recipe.suite.name.replace("_", "-"))


def evaluation_stage_key(checkpoint_id: str, key: str) -> str:
    return f"eval-{checkpoint_id}-{key}"


def plan_evaluation(
    recipe: Recipe,
    checkpoint_id: str,
    run_ids: Mapping[str, str] | None = None,
    *,
    suite: EvalSuite | None = None,
    stage: str = "",
) -> EvaluationPlan:
    """`suite`: None selects the recipe's held-out tasks. `stage`: stage of the checkpoint, for the record."""
    suite = suite or heldout_suite(recipe)
    key = evaluation_key(recipe, suite_digest=suite.digest)
    stage_key = evaluation_stage_key(checkpoint_id, key)
    episodes = {}
    for task in suite.tasks:
        name = suite.name_of(task)
        for seed in recipe.evaluation.seeds:
            plan = EpisodePlan(
                episode_id=f"{stage_key}-{suite.id_of(task)}-s{seed}",
                purpose=EpisodePurpose.EVALUATE,
                checkpoint_id=checkpoint_id,
                # A separate seed for each task: with a shared one, a choice between two actions would come out the same
                # on all tasks. All checkpoints use the same seed on the same task.
                sampling=sampling_params(
                    recipe,
                    temperature=recipe.evaluation.temperature,
                    top_p=EVALUATION_TOP_P,
                    seed=derive_seed(seed, name),
                ),
                seed=seed,
                stage_key=stage_key,
                run_ids=dict(run_ids or {}),
                stage=stage,
                suite=suite.origin,
                suite_name=suite.name,
            )
            episodes[plan.episode_id] = (task, plan)
    return EvaluationPlan(key=key, stage_key=stage_key, suite_digest=suite.digest, episodes=episodes)
