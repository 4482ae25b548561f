"""Supervised fine-tuning on the replay buffer: reads rows and screenshots, trains, leaves a checkpoint.

Killed at any moment and started again with the same job, it goes on from its newest partial checkpoint and ends with
the weights that an uninterrupted run would have made.
"""

import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from osworld_pipeline.agent.model_inputs import PixelCache
from osworld_pipeline.agent.processor import load_processor
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.checkpoint import Checkpoint, Stage
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import TrainingError
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.rollout.trajectories import replay_trajectory
from osworld_pipeline.runs.stages import CARD, checkpoint_card, read_checkpoint, stage_recipe_digest
from osworld_pipeline.tables.replay import load_replay_rows
from osworld_pipeline.training.demonstrations import DemonstrationSet
from osworld_pipeline.training.fence import stage_fence
from osworld_pipeline.trajectories import BlobStore

if TYPE_CHECKING:
    from osworld_pipeline.training.checkpoint import TrainerState
    from osworld_pipeline.training.sft import SftTrainer

Report = Callable[[dict[str, Any]], None]
REPORT_EVERY = 5
"""Updates between two reports of metrics."""
LOSS_WINDOW = 20
"""The checkpoint's loss is the mean over this many last updates."""
PIXEL_CACHE_BYTES = 2 << 30


def main(job: dict[str, Any], report: Report) -> dict[str, Any]:
    """`job`: recipe, state_root, checkpoint_id, stage, parent {checkpoint_id, path}, data_digest; optionally run_ids,
    resume (true), num_threads (all cores). Result: the checkpoint's card.

    Raises:
        TrainingError: no demonstrations, another trainer on this stage, or a loss that is not finite.
        StoreError, TableError: parent, replay buffer or screenshots cannot be read, or the checkpoint not be written.
    """
    state = StateDir(Path(job["state_root"]))
    with stage_fence(state, job["checkpoint_id"]):
        checkpoint = read_checkpoint(state, job["checkpoint_id"])
        if checkpoint is None:
            run = _prepare(job, state)
            _train(run, report)
            checkpoint = _save(run)
    report({"kind": "checkpoint", "checkpoint_id": checkpoint.checkpoint_id, "path": checkpoint.path})
    return checkpoint_card(checkpoint)


@dataclass(kw_only=True)
class _Run:
    job: Mapping[str, Any]
    state: StateDir
    recipe: Recipe
    trainer: "SftTrainer"
    num_demonstrations: int
    num_skipped: int
    num_updates: int = 0
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=LOSS_WINDOW))

    @property
    def metrics(self) -> dict[str, float]:
        return {"loss": math.fsum(self.losses) / len(self.losses)}

    def trainer_state(self) -> "TrainerState":
        from osworld_pipeline.training.checkpoint import TrainerState

        return TrainerState(
            checkpoint_id=self.job["checkpoint_id"],
            parent_id=self.job["parent"]["checkpoint_id"],
            num_updates=self.num_updates,
            recipe=self.recipe.model_dump(mode="json"),
            data_digest=self.job["data_digest"],
            metrics=self.metrics,
            extra={
                "losses": list(self.losses),
                "num_demonstrations": self.num_demonstrations,
                "num_skipped": self.num_skipped,
            },
        )


def _prepare(job: Mapping[str, Any], state: StateDir) -> _Run:
    """Loads the parent, or the newest partial checkpoint, and the demonstrations."""
    import torch

    from osworld_pipeline.training import checkpoint as checkpoints
    from osworld_pipeline.training.model import load_policy
    from osworld_pipeline.training.sft import SftTrainer

    recipe = Recipe.model_validate(job["recipe"])
    torch.set_num_threads(job.get("num_threads") or len(os.sched_getaffinity(0)))
    torch.manual_seed(recipe.sft.seed)
    checkpoints.remove_stale_writes(state, job["checkpoint_id"])
    resumed = checkpoints.latest_complete(state, job["checkpoint_id"]) if job.get("resume", True) else None
    source = resumed or state.root / job["parent"]["path"]
    processor = load_processor(source)
    demonstrations = _demonstrations(state, recipe, processor)
    run = _Run(
        job=job,
        state=state,
        recipe=recipe,
        trainer=SftTrainer(
            load_policy(source, recipe.model),
            processor,
            recipe.sft,
            demonstrations,
            cache=PixelCache(max_bytes=PIXEL_CACHE_BYTES),
        ),
        num_demonstrations=len(demonstrations),
        num_skipped=len(demonstrations.skipped),
    )
    if resumed is not None:
        saved = checkpoints.read_trainer_state(resumed)
        checkpoints.load_optimizer(resumed, run.trainer.optimizer)
        run.num_updates = saved.num_updates
        run.losses.extend(saved.extra["losses"])
    return run


def _demonstrations(state: StateDir, recipe: Recipe, processor: Any) -> DemonstrationSet:
    """The replay buffer, cut to the context; the very layout that rollouts have. What GSPO would not take for a success
    is no demonstration either: threshold and verification are those of `recipe.replay`."""
    renderer, blobs, max_tokens = Renderer(processor), BlobStore(state.blobs), recipe.agent.max_context_tokens
    replay = recipe.replay
    demonstrations = DemonstrationSet(
        load_replay_rows(state, min_reward=replay.threshold, require_verified=replay.require_verified),
        lambda row: replay_trajectory(
            row,
            blobs.read,
            renderer,
            max_tokens=max_tokens,
            max_pixels=recipe.agent.max_pixels,
            dialect=recipe.agent.dialect,
            is_replay=False,
        ),
    )
    if not demonstrations:
        none = f"the replay buffer holds no {'verified ' if replay.require_verified else ''}success"
        why = demonstrations.skipped[0] if demonstrations.skipped else none
        raise TrainingError(f"no demonstration can be trained on with agent.max_context_tokens {max_tokens}: {why}")
    return demonstrations


def _train(run: _Run, report: Report) -> None:
    from osworld_pipeline.training.checkpoint import save_partial

    settings = run.recipe.sft
    while run.num_updates < settings.num_updates:
        started = time.monotonic()
        metrics = run.trainer.update(run.num_updates)
        run.num_updates += 1
        run.losses.append(metrics["loss"])
        done, total = run.num_updates, settings.num_updates
        if done % REPORT_EVERY == 0 or done == total:
            metrics["update_s"] = time.monotonic() - started
            report({"kind": "metrics", "update": done, "metrics": metrics})
            report({"kind": "progress", "done": done, "total": total, "note": f"loss {metrics['loss']:.3f}"})
        if done % settings.save_every == 0 and done < total:
            trainer = run.trainer
            folder = save_partial(
                run.state,
                run.trainer_state(),
                model=trainer.model,
                processor=trainer.processor,
                optimizer=trainer.optimizer,
            )
            report({"kind": "partial", "update": done, "path": str(folder.relative_to(run.state.root))})


def _save(run: _Run) -> Checkpoint:
    from osworld_pipeline.training import checkpoint as checkpoints

    stage, checkpoint_id = Stage(run.job["stage"]), run.job["checkpoint_id"]
    draft = Checkpoint(
        checkpoint_id=checkpoint_id,
        stage=stage,
        parent_id=run.job["parent"]["checkpoint_id"],
        path=str(checkpoints.final_dir(run.state, checkpoint_id).relative_to(run.state.root)),
        num_updates=run.num_updates,
        recipe_digest=stage_recipe_digest(stage, run.recipe),
        data_digest=run.job["data_digest"],
        weights_digest="",
        metrics=run.metrics,
        run_ids=run.job.get("run_ids", {}),
    )

    def documents(folder: Path) -> Mapping[str, Any]:
        return {CARD: checkpoint_card(replace(draft, weights_digest=checkpoints.weights_digest(folder)))}

    checkpoints.save_final(
        run.state,
        run.trainer_state(),
        model=run.trainer.model,
        processor=run.trainer.processor,
        optimizer=run.trainer.optimizer,
        documents=documents,
    )
    saved = read_checkpoint(run.state, checkpoint_id)
    assert saved is not None, f"{checkpoint_id} was saved and cannot be read"
    return saved
