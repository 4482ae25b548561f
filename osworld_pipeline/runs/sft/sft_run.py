"""A stage of supervised fine-tuning on any kind of examples: batches by seed, partial checkpoints, a final checkpoint.

If it is killed and started again with the same job, it resumes from its newest partial checkpoint and ends with the
weights of an uninterrupted run.
"""

import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from osworld_pipeline.agent.model_inputs import PixelCache
from osworld_pipeline.domain.checkpoint import Checkpoint, milestone_id
from osworld_pipeline.domain.replay import TrainedRow
from osworld_pipeline.runs.checkpoints.ids import CARD, checkpoint_card, read_checkpoint, stage_recipe_digest
from osworld_pipeline.runs.messages import Metrics, Progress, Report
from osworld_pipeline.runs.sft.job import SftJob
from osworld_pipeline.runs.stage_log import FAST_UPDATES_S, StageLog, stage_log
from osworld_pipeline.store import BlobStore, TrajectoryStore
from osworld_pipeline.training.demonstrations import Example

if TYPE_CHECKING:
    from osworld_pipeline.training.distributed.process_group import ProcessGroup
    from osworld_pipeline.training.sft import SftTrainer
    from osworld_pipeline.training.weights.checkpoint import TrainerState

REPORT_EVERY = 5
"""Updates between reports of metrics."""
LOSS_WINDOW = 20
"""Number of last updates over which the checkpoint's loss is the mean."""
PIXEL_CACHE_BYTES = 2 << 30


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Training data of a stage."""

    items: Sequence[Example]
    rows: Sequence[TrainedRow]
    """The row of `replay` for each example."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the preparation, stored with the checkpoint."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Number of examples by kind, stored in the trainer's state."""


MakeExamples = Callable[["SftTrainer"], Examples | None]
"""Called once the trainer is open, on rank 0 only; None if nothing is to be trained, which ends the stage."""


def run_sft(job: SftJob, report: Report, make_examples: MakeExamples) -> Checkpoint | None:
    """The stage's checkpoint, trained or loaded. None if `make_examples` returned None, and after training also on
    ranks other than 0; an existing checkpoint is returned on every rank.

    Raises:
        TrainingError: another trainer works on this stage, a loss is not finite, or another rank failed.
        StoreError: the parent cannot be read, or the checkpoint cannot be written.
    """
    from osworld_pipeline.training.distributed.process_group import open_process_group
    from osworld_pipeline.training.weights.stage_lock import stage_lock

    with (
        open_process_group() as process_group,
        stage_lock(job.state, job.checkpoint_id) if process_group.is_main else nullcontext(),
    ):
        checkpoint = process_group.broadcast(
            read_checkpoint(job.state, job.checkpoint_id) if process_group.is_main else None
        )
        if checkpoint is None:
            checkpoint = _train(job, process_group, report, make_examples)
    return checkpoint


def _train(
    job: SftJob, process_group: "ProcessGroup", report: Report, make_examples: MakeExamples
) -> Checkpoint | None:
    trainer = _open_trainer(job, process_group)
    if not process_group.is_main:
        trainer.run_worker()
        return None
    store = TrajectoryStore(job.state)
    try:
        with stage_log(store, job.training_stage, num_updates=trainer.num_updates, gather_s=FAST_UPDATES_S) as log:
            examples = make_examples(trainer)
            if examples is None:
                log.stop("it ended without training")
                return None
            run = _Run(job=job, trainer=trainer, examples=examples, log=log)
            if trainer.num_updates:
                run.remember()
            run.train(report)
            return run.save()
    finally:
        trainer.close()


def _open_trainer(job: SftJob, process_group: "ProcessGroup") -> "SftTrainer":
    """Opens a trainer with the parent, or with the newest partial checkpoint."""
    import torch

    from osworld_pipeline.training.policy_trainer import open_sft_trainer
    from osworld_pipeline.training.weights import checkpoint as checkpoints

    num_cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(job.recipe.trainer.num_threads or max(1, num_cores // process_group.world_size))
    torch.manual_seed(job.settings.seed)
    resumed: Path | None = None
    if process_group.is_main:
        checkpoints.remove_stale_writes(job.state, job.checkpoint_id)
        resumed = checkpoints.latest_complete(job.state, job.checkpoint_id) if job.resume else None
    resumed = process_group.broadcast(resumed)
    return open_sft_trainer(
        resumed or job.parent_folder,
        recipe=job.recipe.model_copy(update={"sft": job.settings}),
        process_group=process_group,
        num_updates=checkpoints.read_trainer_state(resumed).num_updates if resumed else 0,
        cache=PixelCache(max_bytes=PIXEL_CACHE_BYTES),
        read_image=BlobStore(job.state.blobs).read,
    )


@dataclass(kw_only=True)
class _Run:
    job: SftJob
    trainer: "SftTrainer"
    examples: Examples
    log: StageLog
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=LOSS_WINDOW))

    @property
    def metrics(self) -> dict[str, float]:
        return {"loss": math.fsum(self.losses) / len(self.losses), **self.examples.metrics}

    def remember(self) -> None:
        """Restores the losses of the last updates before the run was resumed (LOSS_WINDOW)."""
        from osworld_pipeline.training.weights import checkpoint as checkpoints

        resumed = checkpoints.latest_complete(self.job.state, self.job.checkpoint_id)
        assert resumed is not None, f"{self.job.checkpoint_id} was resumed from nothing"
        self.losses.extend(checkpoints.read_trainer_state(resumed).extra["losses"])

    def train(self, report: Report) -> None:
        from osworld_pipeline.training.weights.checkpoint import keep_milestone, save_partial

        job, trainer, settings = self.job, self.trainer, self.job.settings
        while trainer.num_updates < settings.num_updates:
            started, started_at = time.monotonic(), time.time()
            metrics = trainer.update(self._batch(trainer.num_updates))
            metrics["update_s"] = time.monotonic() - started
            self.losses.append(metrics["loss"])
            done, total = trainer.num_updates, settings.num_updates
            self.log.add(done, metrics, started_at=started_at)
            if done % REPORT_EVERY == 0 or done == total:
                report(Metrics(update=done, metrics=metrics))
                report(Progress(done=done, total=total, note=f"loss {metrics['loss']:.3f}"))
            if done % settings.save_every == 0 and done < total:
                self.log.flush()
                kept = job.recipe.trainer
                keep = None
                if kept.keep_every and done % kept.keep_every == 0:
                    name = milestone_id(job.checkpoint_id, done)
                    keep = partial(keep_milestone, job.state, name=name, documents=self._documents(name))
                save_partial(job.state, trainer, self._state(), keep_last=kept.keep_last, then=keep)

    def _batch(self, update: int) -> list[Any]:
        from osworld_pipeline.training.sft import batch_indices

        settings = self.job.settings
        chosen = batch_indices(
            num_examples=len(self.examples.items), batch_size=settings.batch_size, seed=settings.seed, update=update
        )
        return [trajectory for index in chosen for trajectory in self.examples.items[index]]

    def _rows_seen(self) -> tuple[TrainedRow, ...]:
        from osworld_pipeline.training.sft import examples_seen

        settings = self.job.settings
        seen = examples_seen(
            num_examples=len(self.examples.items), batch_size=settings.batch_size, seed=settings.seed,
            num_updates=self.trainer.num_updates,
        )  # fmt: skip
        return tuple(sorted({self.examples.rows[index] for index in seen}, key=lambda row: row.row_id))

    def _state(self) -> "TrainerState":
        from osworld_pipeline.training.weights.checkpoint import TrainerState

        return TrainerState(
            checkpoint_id=self.job.checkpoint_id,
            parent_id=self.job.parent_id,
            num_updates=self.trainer.num_updates,
            recipe=self.job.recipe.model_dump(mode="json"),
            data_digest=self.job.data_digest,
            metrics=self.metrics,
            code_version=self.job.code.version,
            extra={"losses": list(self.losses), **self.examples.counts},
        )

    def save(self) -> Checkpoint:
        from osworld_pipeline.training.weights import checkpoint as checkpoints

        job = self.job
        self.log.flush()
        checkpoints.save_final(job.state, self.trainer, self._state(), documents=self._documents(job.checkpoint_id))
        saved = read_checkpoint(job.state, job.checkpoint_id)
        assert saved is not None, f"{job.checkpoint_id} was saved and cannot be read"
        return saved

    def _documents(self, checkpoint_id: str) -> Callable[[Path], Mapping[str, Any]]:
        """The files stored next to the weights of the final checkpoint or a milestone. Their content is fixed now,
        although the weights are written later."""
        job, rows = self.job, self._rows_seen()
        checkpoint = Checkpoint(
            checkpoint_id=checkpoint_id,
            stage=job.stage,
            parent_id=job.parent_id,
            path=f"checkpoints/{checkpoint_id}",
            num_updates=self.trainer.num_updates,
            recipe_digest=stage_recipe_digest(job.stage, job.recipe),
            data_digest=job.data_digest,
            weights_digest="",
            metrics=self.metrics,
            run_ids=job.run_ids,
            recipe=job.recipe.model_dump(mode="json"),
            code_version=job.code.version,
            is_code_dirty=job.code.is_dirty,
            saved_at=round(time.time(), 3),
            row_ids=tuple(row.row_id for row in rows),
            sources=rows,
        )
        return partial(_card_of, checkpoint)


def _card_of(checkpoint: Checkpoint, folder: Path) -> Mapping[str, Any]:
    from osworld_pipeline.training.weights.weights_digest import weights_digest

    return {CARD: checkpoint_card(replace(checkpoint, weights_digest=weights_digest(folder)))}
