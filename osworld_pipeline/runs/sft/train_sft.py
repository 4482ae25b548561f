"""Supervised fine-tuning on the replay buffer: reads rows and screenshots, trains, and saves a checkpoint."""

from typing import Any

from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import TrainingError
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.rollout.trajectories import replay_trajectories
from osworld_pipeline.runs.checkpoints.ids import checkpoint_card, task_domains
from osworld_pipeline.runs.messages import Report
from osworld_pipeline.runs.sft.job import SftJob
from osworld_pipeline.runs.sft.sft_run import Examples, run_sft
from osworld_pipeline.store import BlobStore
from osworld_pipeline.tables.builds import one_build
from osworld_pipeline.tables.replay.rows import load_replay_rows
from osworld_pipeline.training.demonstrations import DemonstrationSet, choose_demonstrations


def main(job: SftJob, report: Report) -> dict[str, Any]:
    """Result: the checkpoint's card; empty on a rank other than 0 that has trained.

    Raises:
        TrainingError: there are no demonstrations, another trainer works on this stage, or a loss is not finite.
        StoreError, TableError: inputs cannot be read, the replay buffer is empty, or the checkpoint cannot be written.
    """

    def examples(trainer: Any) -> Examples:
        demonstrations = read_demonstrations(job.state, job.recipe, trainer.processor)
        return Examples(
            items=demonstrations,
            rows=demonstrations.rows,
            counts={"num_demonstrations": len(demonstrations), "num_skipped": len(demonstrations.skipped)},
        )

    checkpoint = run_sft(job, report, examples)
    return checkpoint_card(checkpoint) if checkpoint is not None else {}


def read_demonstrations(state: StateDir, recipe: Recipe, processor: Any) -> DemonstrationSet:
    """The replay buffer's rows that the recipe selects, cut to the context, in the layout of rollouts. Only rows that
    GSPO would accept as successes are used: `recipe.replay` sets threshold and verification.

    Raises:
        TrainingError: none of them can be trained on; names the reason.
        TableError: the replay buffer is empty, or the tables cannot be read.
    """
    renderer, blobs, max_tokens = Renderer(processor), BlobStore(state.blobs), recipe.agent.max_context_tokens
    replay = recipe.replay
    with one_build(state):
        rows = load_replay_rows(state, min_reward=replay.threshold, require_verified=replay.require_verified)
        named = [(row.row_id, row.original_task_id) for row in rows]
        chosen = choose_demonstrations(named, recipe.sft, domains=task_domains(state))
    demonstrations = DemonstrationSet(
        [row for row in rows if row.row_id in chosen],
        lambda row: replay_trajectories(row, blobs.read, renderer, agent=recipe.agent, is_replay=False),
    )
    if not demonstrations:
        none = f"the replay buffer holds no {'verified ' if replay.require_verified else ''}success"
        why = demonstrations.skipped[0] if demonstrations.skipped else none
        raise TrainingError(f"no demonstration can be trained on with agent.max_context_tokens {max_tokens}: {why}")
    return demonstrations
