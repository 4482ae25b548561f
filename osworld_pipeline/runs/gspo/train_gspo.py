"""A GSPO phase: collect groups on real desktops, score them, train, hand the weights to the engine, save, repeat.

A killed phase resumes from its last checkpoint. A synchronous phase repeats the later updates exactly, with the same
ids; an asynchronous one marks its later records as superseded and rolls out again. A phase that has used up its budget
leaves a checkpoint to resume from, and a milestone that is its result until the phase is resumed.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from osworld_pipeline.agent.model_inputs import PixelCache
from osworld_pipeline.domain.checkpoint import Checkpoint, milestone_id
from osworld_pipeline.domain.hold import hold_metrics
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.rollout.canary import needs_canary, sample_canary
from osworld_pipeline.rollout.collector import Collector
from osworld_pipeline.rollout.task_sampling import open_task_sampler
from osworld_pipeline.runs.budget import Budget, spent_by
from osworld_pipeline.runs.checkpoints.ids import (
    CARD,
    checkpoint_card,
    read_checkpoint,
    stage_params,
    stage_recipe_digest,
)
from osworld_pipeline.runs.gspo.engine import PhaseRollouts, open_rollouts
from osworld_pipeline.runs.gspo.held_updates import collect_update
from osworld_pipeline.runs.gspo.job import GspoJob, ResumePoint, load_gspo_tasks, resume_point
from osworld_pipeline.runs.gspo.metrics import coverage_metrics, group_metrics, reward_lines
from osworld_pipeline.runs.gspo.rollouts import open_collector, opened_replay, read_recent, record_batch
from osworld_pipeline.runs.gspo.trainer_thread import TrainerThread
from osworld_pipeline.runs.gspo.weight_transfer import WeightTransfer
from osworld_pipeline.runs.messages import Info, Metrics, Report, Warned
from osworld_pipeline.runs.stage_log import StageLog, stage_log
from osworld_pipeline.store import BlobStore, TrajectoryStore
from osworld_pipeline.tables.replay.rows import ReplayCoverage, replay_coverage
from osworld_pipeline.wire.tracing import add_to_episodes

if TYPE_CHECKING:
    from osworld_pipeline.training.distributed.process_group import ProcessGroup
    from osworld_pipeline.training.update import GspoTrainer


def main(job: GspoJob, report: Report) -> dict[str, Any]:
    """Result: checkpoint_id; if the budget ended the phase early, the id of its milestone, and the reason as `stopped`.
    With several ranks, only rank 0 rolls out, reports and holds the stage lock; the others follow it."""
    from osworld_pipeline.training.distributed.process_group import open_process_group
    from osworld_pipeline.training.weights.checkpoint import remove_stale_writes
    from osworld_pipeline.training.weights.stage_lock import stage_lock

    result = {"checkpoint_id": job.checkpoint_id}
    if read_checkpoint(job.state, job.checkpoint_id) is not None:
        return result
    with open_process_group() as process_group:
        if not process_group.is_main:
            _open_trainer(job, resume_point(job), process_group).run_worker()
            return result
        with stage_lock(job.state, job.checkpoint_id):
            if read_checkpoint(job.state, job.checkpoint_id) is None:
                remove_stale_writes(job.state, job.checkpoint_id)
                point = resume_point(job)
                store = TrajectoryStore(job.state)
                with stage_log(store, job.training_stage, num_updates=point.num_updates) as log:
                    ended = asyncio.run(_train(job, process_group, point, log, report))
                    log.stop(ended.get("stopped", ""))
                return ended
    return result


async def _train(
    job: GspoJob, process_group: "ProcessGroup", point: ResumePoint, log: StageLog, report: Report
) -> dict[str, Any]:
    cache = PixelCache()
    with TrainerThread() as thread:
        trainer = await thread(partial(_open_trainer, job, point, process_group, cache))
        try:
            async with open_rollouts(job, trainer, thread, point, cache, report) as rollouts:
                return await train_phase(job, rollouts, trainer, thread, point, log, report)
        finally:
            await thread(trainer.close)


async def train_phase(
    job: GspoJob,
    rollouts: PhaseRollouts,
    trainer: "GspoTrainer",
    thread: TrainerThread,
    point: ResumePoint,
    log: StageLog,
    report: Report,
) -> dict[str, Any]:
    """Runs the updates from `point` on, at least one and as many as the budget allows; returns the program's result.
    `thread`: the thread that calls the trainer.

    Raises:
        TableError: there are no training tasks.
        EnvServerError, EngineError: no episode can be run.
        EnvServerError, EngineError, EvaluatorError, TrainingError: an update was held too often (collect_update).
        StoreError, TrainingError: as store and trainer.
    """
    tasks = load_gspo_tasks(job.state, job.recipe)
    coverage = await asyncio.to_thread(replay_coverage, job.state, [task.task_id for task in tasks], job.recipe.replay)
    sampler = open_task_sampler(
        tasks,
        job.recipe.rollout,
        seed=f"{job.stage}:{job.phase.seed}",
        tasks_per_update=job.recipe.gspo.tasks_per_update,
        read_recent=partial(read_recent, job),
    )
    async with (
        opened_replay(job) as replay,
        open_collector(job, rollouts, sampler, replay, point, report) as collector,
        WeightTransfer(
            rollouts.handover, collector, is_overlapped=job.recipe.rollout.mode == "asynchronous"
        ) as transfer,
    ):
        phase = _Phase(
            job=job,
            rollouts=rollouts,
            trainer=trainer,
            thread=thread,
            collector=collector,
            transfer=transfer,
            coverage=coverage,
            log=log,
            report=report,
        )
        budget = job.budget
        for update in range(point.num_updates, job.phase.num_updates):
            ended = await phase.run_update(update, budget)
            budget = ended.budget
            if ended.stopped:
                return {"checkpoint_id": milestone_id(phase.job.checkpoint_id, update + 1), "stopped": ended.stopped}
    return {"checkpoint_id": job.checkpoint_id}


@dataclass(frozen=True, kw_only=True)
class _UpdateEnd:
    budget: Budget
    """The remaining budget after the update."""
    stopped: str
    """Why the phase stops before its end; empty if another update follows."""


@dataclass(frozen=True, kw_only=True)
class _Phase:
    job: GspoJob
    rollouts: PhaseRollouts
    trainer: "GspoTrainer"
    thread: TrainerThread
    collector: Collector
    transfer: WeightTransfer
    coverage: ReplayCoverage
    log: StageLog
    report: Report

    async def run_update(self, update: int, budget: Budget) -> _UpdateEnd:
        started, started_at = time.monotonic(), time.time()
        log = partial(self.log.add, update + 1, started_at=started_at)
        collecting = collect_update(
            self.collector,
            update,
            self.job.recipe.rollout,
            record=partial(record_batch, self.rollouts.store, self.job, update=update),
            log=log,
            report=self.report,
        )
        collected = await self.transfer.unless_failed(collecting)
        batch, rollout_s = collected.batch, time.monotonic() - started
        for line in reward_lines(batch.groups, limit=self.job.recipe.rollout.reported_rewards):
            self.report(Info(message=f"update {update + 1}: {line}"))
        for skipped in batch.skipped:
            self.report(Warned(message=f"update {update + 1}: {skipped}"))
        update_started_at = time.time()
        metrics = await self._train(batch.trajectories, update)
        add_to_episodes(
            "train",
            sorted({one.episode_id for one in batch.trajectories if not one.is_replay}),
            started_at=update_started_at,
            attributes={"osworld.checkpoint_id": self.job.checkpoint_id, "osworld.update": update},
        )
        metrics = {**hold_metrics(None), "num_held_tries": float(len(collected.held)), **metrics}
        if metrics["is_held"]:
            self.report(Warned(message=f"update {update + 1}: {self._held_text(metrics)}"))
        metrics |= group_metrics(batch, update=update) | coverage_metrics(self.coverage)
        metrics |= self.rollouts.utilisation.metrics()
        if self.rollouts.parity is not None:
            metrics |= self.rollouts.parity.metrics()
        metrics |= await self.transfer.end()
        metrics |= {"rollout_s": rollout_s, "update_s": time.monotonic() - started - rollout_s}
        await asyncio.to_thread(log, metrics)
        num_updates = update + 1
        is_last = num_updates == self.job.phase.num_updates
        budget = budget.less(spent_by(collected.whole.episodes))
        stopped = "" if is_last else budget.end_reason(now=time.time())
        if is_last or stopped or num_updates % self.job.recipe.trainer.save_every == 0:
            save = partial(self._save, num_updates, metrics, self.collector.snapshot())
            await self.thread(partial(save, is_final=is_last, is_kept=bool(stopped)))
        if not is_last and not stopped:
            await self.transfer.begin(num_updates)
        self.report(Metrics(update=num_updates, metrics=metrics))
        if stopped:
            done = f"{num_updates} of {self.job.phase.num_updates} updates"
            self.report(Warned(message=f"{stopped}: stopped after {done}; it can be resumed"))
        return _UpdateEnd(budget=budget, stopped=stopped)

    async def _train(self, trajectories: Sequence[Trajectory], update: int) -> dict[str, float]:
        """Trains on these and, if none of their tokens was sampled with the trainer's weights, on a canary, so that
        trainer and sampler are compared. If the weights are still being sent to the engine, the batch is scored
        meanwhile, and the canary is sampled when they have arrived."""
        if self.transfer.is_running:
            late = self._canaries(trajectories, update)
            with self.rollouts.utilisation.trainer.busy():
                return await self.thread.update(self.trainer, trajectories, late)
        canaries = await self._canaries(trajectories, update)
        with self.rollouts.utilisation.trainer.busy():
            return await self.thread(partial(self.trainer.update, (*trajectories, *canaries)))

    async def _canaries(self, trajectories: Sequence[Trajectory], update: int) -> Sequence[Trajectory]:
        """A canary of the weights that the engine has received, if one is needed."""
        await self.transfer.wait()
        if not needs_canary(trajectories, update=update):
            return ()
        canary = await sample_canary(
            trajectories,
            update=update,
            generate=self.rollouts.generate,
            sampling=self.job.sampling,
            image_id=self.rollouts.renderer.image_id,
        )
        return (canary,)

    def _held_text(self, metrics: Mapping[str, float]) -> str:
        return (
            f"held: its importance weights reduce the effective sample size to {metrics['effective_share']:.1%} of the "
            f"batch, less than gspo.min_effective_share ({self.job.recipe.gspo.min_effective_share:.0%}); the policy's "
            "weights are unchanged. If this continues, lower rollout.max_staleness or gspo.learning_rate"
        )

    def _save(
        self,
        num_updates: int,
        metrics: Mapping[str, float],
        snapshot: Mapping[str, Any],
        *,
        is_final: bool,
        is_kept: bool,
    ) -> None:
        """Starts writing a partial checkpoint, or finishes with the final one or a milestone (`is_kept`, overriding the
        recipe)."""
        from osworld_pipeline.training.weights.checkpoint import (
            TrainerState,
            keep_milestone,
            save_final,
            save_partial,
        )

        job = self.job
        trainer_state = TrainerState(
            checkpoint_id=job.checkpoint_id,
            parent_id=job.parent_id,
            num_updates=num_updates,
            recipe=job.recipe.model_dump(mode="json"),
            data_digest=job.data_digest,
            metrics=metrics,
            code_version=job.code.version,
            extra={"collector": snapshot},
        )
        if is_final:
            documents = partial(_documents, job, job.checkpoint_id, num_updates, metrics)
            save_final(job.state, self.trainer, trainer_state, documents=documents)
            return
        kept, keep = job.recipe.trainer, None
        if is_kept or (kept.keep_every and num_updates % kept.keep_every == 0):
            name = milestone_id(job.checkpoint_id, num_updates)
            documents = partial(_documents, job, name, num_updates, metrics)
            keep = partial(keep_milestone, job.state, name=name, documents=documents)
        save_partial(job.state, self.trainer, trainer_state, keep_last=kept.keep_last, then=keep)
        if is_kept:
            self.trainer.wait_saved()


def _documents(
    job: GspoJob, checkpoint_id: str, num_updates: int, metrics: Mapping[str, float], folder: Path
) -> Mapping[str, Any]:
    """The files stored next to the weights of the final checkpoint or a milestone."""
    from osworld_pipeline.training.weights.weights_digest import weights_digest

    checkpoint = Checkpoint(
        checkpoint_id=checkpoint_id,
        stage=job.stage,
        parent_id=job.parent_id,
        path=f"checkpoints/{checkpoint_id}",
        num_updates=num_updates,
        recipe_digest=stage_recipe_digest(job.stage, job.recipe),
        data_digest=job.data_digest,
        weights_digest=weights_digest(folder),
        metrics=metrics,
        run_ids=job.run_ids,
        recipe=job.recipe.model_dump(mode="json"),
        code_version=job.code.version,
        is_code_dirty=job.code.is_dirty,
        saved_at=round(time.time(), 3),
    )
    return {CARD: checkpoint_card(checkpoint), "stage_params.json": stage_params(job.stage, job.recipe)}


def _open_trainer(
    job: GspoJob, point: ResumePoint, process_group: "ProcessGroup", cache: PixelCache | None = None
) -> "GspoTrainer":
    from osworld_pipeline.training.policy_trainer import open_gspo_trainer

    return open_gspo_trainer(
        point.folder,
        reference_folder=job.parent_folder,
        recipe=job.recipe,
        phase=job.phase,
        process_group=process_group,
        num_updates=point.num_updates,
        cache=cache,
        read_image=BlobStore(job.state.blobs).read,
        may_sample=job.actors is None,
    )
