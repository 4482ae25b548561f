"""The rollouts of a GSPO phase: the collector that the recipe selects, and the record of what it collected."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from osworld_pipeline.domain.episode import Episode
from osworld_pipeline.domain.group import RolloutGroup
from osworld_pipeline.domain.task import Task
from osworld_pipeline.rollout.async_collector import AsynchronousCollector
from osworld_pipeline.rollout.batch import GspoBatch
from osworld_pipeline.rollout.collector import Collector, FaultWatch, SynchronousCollector
from osworld_pipeline.rollout.replay import ReplayBuffer
from osworld_pipeline.rollout.run_episode import RunEpisode
from osworld_pipeline.rollout.run_group import in_turn, run_group
from osworld_pipeline.rollout.task_sampling import RECENT_GROUPS, TaskSampler
from osworld_pipeline.runs.checkpoints.ids import checkpoint_lineage
from osworld_pipeline.runs.gspo.batch import RowRenderer, StageBatchBuilder
from osworld_pipeline.runs.gspo.engine import PhaseRollouts
from osworld_pipeline.runs.gspo.job import GspoJob, ResumePoint
from osworld_pipeline.runs.gspo.superseding import supersede
from osworld_pipeline.runs.messages import Progress, Report
from osworld_pipeline.runs.metrics.observing import observed_episodes, watching_groups, watching_meter
from osworld_pipeline.runs.rollouts.session import num_slots
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.replay.recent_success import RecentEpisodes, recent_success


@asynccontextmanager
async def open_collector(
    job: GspoJob,
    rollouts: PhaseRollouts,
    sampler: TaskSampler,
    replay: ReplayBuffer,
    point: ResumePoint,
    report: Report,
) -> AsyncIterator[Collector]:
    recipe, gspo = job.recipe, job.recipe.gspo
    run_one = _episodes_of(job, rollouts, point, report)
    builder = StageBatchBuilder(
        replay=replay,
        settings=recipe.replay,
        render_row=RowRenderer(
            agent=recipe.agent,
            renderer=rollouts.renderer,
            temperature=job.phase.temperature,
            read_blob=rollouts.store.read_blob,
            find_episode=rollouts.store.find_episode,
        ),
        read_blob=rollouts.store.read_blob,
        estimator=gspo.advantage,
        denominator=gspo.denominator,
        signal=recipe.rollout.signal,
        min_valid=recipe.rollout.min_valid_episodes,
        max_tokens=recipe.trainer.max_tokens_per_batch,
    )

    async def run_one_group(task: Task, group_id: str, update: int) -> RolloutGroup:
        return await run_group(task, job.group_plan(update), group_id, run_one=run_one)

    shared: dict[str, Any] = {
        "stage_key": job.checkpoint_id,
        "section": recipe.rollout,
        "groups_per_update": gspo.tasks_per_update,
    }
    collector: Collector
    if recipe.rollout.mode == "synchronous":
        collector = SynchronousCollector(run_one_group, builder, sampler, **shared)
    else:
        await asyncio.to_thread(supersede, rollouts.store, job.checkpoint_id, point.num_updates)
        collector = AsynchronousCollector(
            run_one_group,
            builder,
            sampler,
            num_updates=job.phase.num_updates,
            first_update=point.num_updates,
            resumed=point.collector or None,
            **shared,
        )
    async with collector:
        with (
            watching_groups(collector),
            watching_meter("environments", rollouts.utilisation.environments),
            watching_meter("trainer", rollouts.utilisation.trainer),
        ):
            yield collector


def _episodes_of(job: GspoJob, rollouts: PhaseRollouts, point: ResumePoint, report: Report) -> RunEpisode:
    """Runs this phase's episodes: metered, as many in parallel as allowed, each reported at its end."""
    gspo = job.recipe.gspo
    per_update = gspo.group_size * gspo.tasks_per_update
    total = job.phase.num_updates * per_update
    watch = FaultWatch(per_update, can_hold=job.recipe.rollout.max_fault_share < 1)
    ended: list[bool] = []

    def on_episode(episode: Episode) -> None:
        ended.append(episode.is_success)
        done = min(total, point.num_updates * per_update + len(ended))
        recent = ended[-per_update:]
        note = f"last {len(recent)}: {sum(recent)} succeeded"
        report(Progress(done=done, total=total, note=note))
        watch(episode)

    run_one = observed_episodes(rollouts.run_one, rollouts.utilisation.environments)
    return in_turn(run_one, num_slots(job.recipe, job.servers), on_episode=on_episode)


def record_batch(store: TrajectoryStore, job: GspoJob, batch: GspoBatch, update: int) -> None:
    """A rerun replaces the part, because it has the same name. Raises StoreError."""
    part = f"{job.checkpoint_id}-u{update:04d}"
    store.write_episodes(part, batch.episodes)
    store.write_groups(part, batch.groups, batch.injections)


def read_recent(job: GspoJob, update: int) -> Mapping[str, RecentEpisodes]:
    """Recent episodes by task before `update`, of this stage and the stages that it descends from. Raises TableError,
    StoreError."""
    return recent_success(
        job.state,
        stage_key=job.checkpoint_id,
        lineage=checkpoint_lineage(job.state, job.parent_id),
        update=update,
        num_groups=RECENT_GROUPS,
    )


@asynccontextmanager
async def opened_replay(job: GspoJob) -> AsyncIterator[ReplayBuffer]:
    buffer = await asyncio.to_thread(
        ReplayBuffer,
        job.state,
        job.recipe.replay,
        stage_key=job.checkpoint_id,
        lineage=checkpoint_lineage(job.state, job.parent_id),
        seed=job.phase.seed,
    )
    with buffer:
        yield buffer
