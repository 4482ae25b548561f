"""A GSPO phase: roll out groups on real desktops, score them, join replay, update, save; again.

Rollouts of an update are sampled by exactly the weights that the update trains (synchronous). A killed phase goes on
from its last saved update: the groups of the update it was in are rolled out anew, under the same ids.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from osworld_pipeline.agent.model_inputs import PixelCache
from osworld_pipeline.agent.processor import load_processor
from osworld_pipeline.domain.checkpoint import Checkpoint, Stage
from osworld_pipeline.domain.episode import Episode, SamplingParams
from osworld_pipeline.domain.group import RolloutGroup
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import TableError
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.recipes.schema import GspoPhaseSection
from osworld_pipeline.rollout.replay import ReplayBuffer
from osworld_pipeline.rollout.run_group import GroupPlan, require_desktops, run_groups
from osworld_pipeline.runs.embedded_server import EnvServers
from osworld_pipeline.runs.gspo_batch import GspoBatch, RowRenderer, build_batch
from osworld_pipeline.runs.rollout_session import RolloutSession, episode_settings, rollout_session
from osworld_pipeline.runs.stages import (
    CARD,
    checkpoint_card,
    checkpoint_lineage,
    read_checkpoint,
    stage_params,
    stage_recipe_digest,
)
from osworld_pipeline.tables.owned import read_table
from osworld_pipeline.tables.replay import ReplayCoverage, replay_coverage

Report = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class GspoJob:
    recipe: Recipe
    phase: GspoPhaseSection
    stage: Stage
    state: StateDir
    checkpoint_id: str
    parent_id: str
    parent_folder: Path
    data_digest: str
    servers: EnvServers
    run_ids: Mapping[str, str]

    @classmethod
    def parse(cls, job: Mapping[str, Any]) -> "GspoJob":
        recipe = Recipe.model_validate(job["recipe"])
        stage = Stage(job["stage"])
        state = StateDir(Path(job["state_root"]))
        return cls(
            recipe=recipe,
            phase=recipe.gspo.phase1 if stage is Stage.GSPO_PHASE1 else recipe.gspo.phase2,
            stage=stage,
            state=state,
            checkpoint_id=job["checkpoint_id"],
            parent_id=job["parent"]["checkpoint_id"],
            parent_folder=state.root / job["parent"]["path"],
            data_digest=job["data_digest"],
            servers=EnvServers.from_job(job["servers"]),
            run_ids=job.get("run_ids", {}),
        )


def main(job: dict[str, Any], report: Report) -> dict[str, Any]:
    """`job`: recipe, stage, state_root, checkpoint_id, parent, data_digest, servers, run_ids."""
    from osworld_pipeline.training.checkpoint import remove_stale_writes
    from osworld_pipeline.training.fence import stage_fence

    parsed = GspoJob.parse(job)
    with stage_fence(parsed.state, parsed.checkpoint_id):
        if read_checkpoint(parsed.state, parsed.checkpoint_id) is None:
            remove_stale_writes(parsed.state, parsed.checkpoint_id)
            asyncio.run(_train(parsed, report))
    return {"checkpoint_id": parsed.checkpoint_id}


async def _train(job: GspoJob, report: Report) -> None:
    from osworld_pipeline.training.model import load_policy
    from osworld_pipeline.training.update import GspoTrainer

    gspo = job.recipe.gspo
    cache = PixelCache()
    processor = load_processor(job.parent_folder)
    folder, first_update = _resume_point(job)
    model = load_policy(folder, job.recipe.model)
    reference = load_policy(job.parent_folder, job.recipe.model, is_frozen=True) if gspo.kl_coef > 0 else None
    trainer = GspoTrainer(model, processor, gspo, reference=reference, seed=job.phase.seed, cache=cache)
    if first_update:
        from osworld_pipeline.training.checkpoint import load_optimizer

        load_optimizer(folder, trainer.optimizer)
    tasks = load_train_tasks(job.state)
    coverage = replay_coverage(job.state, [task.task_id for task in tasks], job.recipe.replay)
    metrics: dict[str, float] = {}
    async with (
        rollout_session(
            recipe=job.recipe,
            state=job.state,
            servers=job.servers,
            model=model,
            processor=processor,
            client_id=job.checkpoint_id,
            policy_version=first_update,
            cache=cache,
        ) as session,
        _opened_replay(job) as replay,
    ):
        for update in range(first_update, job.phase.num_updates):
            started = time.monotonic()
            groups = await _roll_out(job, session, choose_tasks(tasks, job, update), update, report)
            rollout_s = time.monotonic() - started
            batch = await asyncio.to_thread(_make_batch, job, session, groups, replay, update)
            for skipped in batch.skipped:
                report({"kind": "warning", "message": f"update {update + 1}: {skipped}"})
            metrics = await asyncio.to_thread(trainer.update, batch.trajectories, update=update)
            metrics |= group_metrics(batch) | coverage_metrics(coverage) | {"rollout_s": rollout_s}
            metrics["update_s"] = time.monotonic() - started - rollout_s
            session.engine.mark_updated(policy_version=update + 1)
            is_last = update + 1 == job.phase.num_updates
            await asyncio.to_thread(_save, job, trainer, update + 1, metrics, is_final=is_last)
            report({"kind": "metrics", "update": update + 1, "metrics": metrics})


def load_train_tasks(state: StateDir) -> list[Task]:
    """The tasks that can be trained on, in the order of their ids.

    Raises:
        TableError: there is none.
    """
    rows = read_table(state, "train_tasks").to_pylist()
    if not rows:
        raise TableError(f"there are no training tasks in {state.tables}: materialize train_tasks first")
    tasks = [Task.from_config(orjson.loads(row["task_config"]), domain=row["domain"]) for row in rows]
    return sorted(tasks, key=lambda task: task.task_id)


def choose_tasks(tasks: Sequence[Task], job: GspoJob, update: int) -> list[Task]:
    """The tasks of an update: every task once, in seeded order, before any comes again."""
    count = job.recipe.gspo.tasks_per_update
    chosen: list[Task] = []
    for position in range(update * count, (update + 1) * count):
        round_number, index = divmod(position, len(tasks))
        order = list(tasks)
        random.Random(f"{job.stage}:{job.phase.seed}:{round_number}").shuffle(order)
        chosen.append(order[index])
    return chosen


async def _roll_out(
    job: GspoJob, session: RolloutSession, tasks: Sequence[Task], update: int, report: Report
) -> tuple[RolloutGroup, ...]:
    gspo = job.recipe.gspo
    per_update = gspo.group_size * len(tasks)
    ended: list[Episode] = []

    def on_episode(episode: Episode) -> None:
        ended.append(episode)
        successes = sum(other.is_success for other in ended)
        report(
            {
                "kind": "progress",
                "done": update * per_update + len(ended),
                "total": job.phase.num_updates * per_update,
                "note": f"update {update + 1}: {successes}/{len(ended)} episodes succeeded",
            }
        )

    plan = GroupPlan(
        stage_key=job.checkpoint_id,
        update=update,
        group_size=gspo.group_size,
        checkpoint_id=job.parent_id,
        sampling=SamplingParams(
            temperature=job.phase.temperature,
            top_p=gspo.top_p,
            max_new_tokens=job.recipe.agent.max_response_tokens,
            seed=job.phase.seed,
        ),
        run_ids=job.run_ids,
    )
    settings = episode_settings(job.recipe, max_turns=job.recipe.agent.max_turns)
    groups = await run_groups(tasks, plan, tools=session.tools, settings=settings, on_episode=on_episode)
    require_desktops(ended)
    return groups


def _make_batch(
    job: GspoJob, session: RolloutSession, groups: Sequence[RolloutGroup], replay: ReplayBuffer, update: int
) -> GspoBatch:
    """Builds the batch and writes what happened; the part's name makes a rerun replace it."""
    render_row = RowRenderer(
        agent=job.recipe.agent,
        renderer=session.renderer,
        read_blob=session.store.read_blob,
        find_episode=session.store.find_episode,
    )
    batch = build_batch(
        groups,
        update=update,
        replay=replay,
        settings=job.recipe.replay,
        render_row=render_row,
        read_blob=session.store.read_blob,
    )
    part = f"{job.checkpoint_id}-u{update:04d}"
    session.store.write_episodes(part, [episode for group in groups for episode in group.episodes])
    session.store.write_groups(part, batch.groups, batch.injections)
    return batch


def group_metrics(batch: GspoBatch) -> dict[str, float]:
    """Figures of the rollouts; raw success and shaped reward are never mixed."""
    episodes = [episode for group in batch.groups for episode in group.episodes]
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    num_valid = max(1, len(rewards))
    return {
        "task_reward_mean": sum(reward.task for reward in rewards) / num_valid,
        "shaped_reward_mean": sum(reward.shaped for reward in rewards) / num_valid,
        "success_rate": sum(episode.is_success for episode in episodes) / num_valid,
        "num_episodes": float(len(episodes)),
        "num_faults": float(sum(not episode.outcome.is_valid for episode in episodes)),
        "num_injections": float(len(batch.injections)),
        "num_zero_variance_groups": float(batch.num_zero_variance),
        "num_replay_checks": float(batch.replay.num_checks),
        "num_failed_groups": float(batch.replay.num_failed),
        "num_replay_online": float(batch.replay.num_online),
        "num_replay_verified": float(batch.replay.num_verified),
        "num_replay_skipped": float(batch.replay.num_skipped),
        "replay_rate": batch.replay.rate,
        "turns_mean": sum(len(episode.steps) for episode in episodes) / max(1, len(episodes)),
    }


def coverage_metrics(coverage: ReplayCoverage) -> dict[str, float]:
    """Which share of the training tasks the demonstrations could serve, and those that proved themselves."""
    return {"replay_coverage": coverage.share, "replay_verified_coverage": coverage.verified_share}


@asynccontextmanager
async def _opened_replay(job: GspoJob) -> AsyncIterator[ReplayBuffer]:
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


def _resume_point(job: GspoJob) -> tuple[Path, int]:
    from osworld_pipeline.training.checkpoint import latest_complete, read_trainer_state

    partial = latest_complete(job.state, job.checkpoint_id)
    if partial is None:
        return job.parent_folder, 0
    return partial, read_trainer_state(partial).num_updates


def _save(job: GspoJob, trainer: Any, num_updates: int, metrics: Mapping[str, float], *, is_final: bool) -> None:
    from osworld_pipeline.training.checkpoint import TrainerState, save_final, save_partial, weights_digest

    trainer_state = TrainerState(
        checkpoint_id=job.checkpoint_id,
        parent_id=job.parent_id,
        num_updates=num_updates,
        recipe=job.recipe.model_dump(mode="json"),
        data_digest=job.data_digest,
        metrics=metrics,
    )
    parts = {"model": trainer.model, "processor": trainer.processor, "optimizer": trainer.optimizer}
    if not is_final:
        save_partial(job.state, trainer_state, **parts)
        return

    def documents(folder: Path) -> Mapping[str, Any]:
        checkpoint = Checkpoint(
            checkpoint_id=job.checkpoint_id,
            stage=job.stage,
            parent_id=job.parent_id,
            path=f"checkpoints/{job.checkpoint_id}",
            num_updates=num_updates,
            recipe_digest=stage_recipe_digest(job.stage, job.recipe),
            data_digest=job.data_digest,
            weights_digest=weights_digest(folder),
            metrics=metrics,
            run_ids=job.run_ids,
        )
        return {CARD: checkpoint_card(checkpoint), "stage_params.json": stage_params(job.stage, job.recipe)}

    save_final(job.state, trainer_state, **parts, documents=documents)
