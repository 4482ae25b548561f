"""Three trainings that differ in seeds alone, from one start, all evaluated with three seeds on 28 tasks."""

from checkpoint_samples import make_checkpoint, trained_with
from episode_samples import make_episode

from osworld_pipeline.domain.checkpoint import Checkpoint, Stage, milestone_id
from osworld_pipeline.domain.episode import Episode, Outcome, Reward
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes import load_recipe
from osworld_pipeline.runs.evaluate.plan import plan_evaluation
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.checkpoints import upsert_checkpoint

RECIPE = load_recipe("demo", settings=["suite.name=desktop_basics", "suite.num_heldout=2", "evaluation.seeds=[0,1,2]"])
START = trained_with(Stage.SFT, 0, None)
ENDS = [trained_with(Stage.GSPO_PHASE1, seed, START.checkpoint_id) for seed in range(3)]
MILESTONE = make_checkpoint(
    milestone_id(ENDS[0].checkpoint_id, 2), Stage.GSPO_PHASE1, parent_id=START.checkpoint_id, num_updates=2
)
NUM_SOLVED = ((START, 6), (MILESTONE, 12), (ENDS[0], 20), (ENDS[1], 18), (ENDS[2], 21))
"""Tasks that a checkpoint solves with every seed; it solves one more with the first."""


def write_three_runs(state: StateDir) -> None:
    for checkpoint, num_solved in NUM_SOLVED:
        upsert_checkpoint(state, checkpoint)
        TrajectoryStore(state).write_episodes(checkpoint.checkpoint_id, _evaluate(checkpoint, num_solved))


def _evaluate(checkpoint: Checkpoint, num_solved: int) -> list[Episode]:
    plan = plan_evaluation(RECIPE, checkpoint.checkpoint_id)
    task_ids = sorted({task.task_id for task, _ in plan.episodes.values()})
    return [
        make_episode(
            planned.episode_id, task_id=task.task_id, checkpoint_id=checkpoint.checkpoint_id, seed=planned.seed,
            stage_key=plan.stage_key, outcome=Outcome.SUCCESS if is_solved else Outcome.FAILURE,
            reward=Reward(task=float(is_solved)),
        )
        for task, planned in plan.episodes.values()
        for is_solved in [task_ids.index(task.task_id) < num_solved + (planned.seed == 0)]
    ]  # fmt: skip
