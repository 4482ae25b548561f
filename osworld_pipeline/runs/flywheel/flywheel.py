"""One round of the flywheel: roll out the training tasks, keep the episodes with enough raw task reward, and fine-tune
on them (together with the demonstrations if the recipe says so).

A killed round resumes: each graded episode is stored as its own part and not run again, and training resumes from the
newest partial checkpoint.
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.episode import Episode
from osworld_pipeline.domain.group import GroupStatus, RolloutGroup
from osworld_pipeline.domain.replay import ReplayRow, TrainedRow, base_task_id
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import EngineError
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.recipes.schema import FlywheelSection
from osworld_pipeline.rollout.run_episode import EpisodePlan, RunEpisode
from osworld_pipeline.rollout.run_group import (
    GroupPlan,
    OnEpisode,
    gather_groups,
    group_id_of,
    in_turn,
    plan_episode,
    require_services,
)
from osworld_pipeline.rollout.trajectories import online_replay_trajectories
from osworld_pipeline.runs.checkpoints.ids import checkpoint_card
from osworld_pipeline.runs.flywheel.plan import FlywheelJob, Measurement, read_measurement, stop_reason
from osworld_pipeline.runs.gspo.job import load_train_tasks
from osworld_pipeline.runs.messages import Metrics, Progress, Report, Warned
from osworld_pipeline.runs.rollouts.episode_writer import EpisodeWriter
from osworld_pipeline.runs.rollouts.rollouts import open_rollouts
from osworld_pipeline.runs.rollouts.session import num_slots, sampling_params
from osworld_pipeline.runs.sft.sft_run import Examples, run_sft
from osworld_pipeline.runs.sft.train_sft import read_demonstrations
from osworld_pipeline.store import BlobStore, TrajectoryStore
from osworld_pipeline.tables.replay.candidates import ONLINE
from osworld_pipeline.training.demonstrations import Example, LazyExamples, join_examples

if TYPE_CHECKING:
    from osworld_pipeline.training.sft import SftTrainer

UPDATE = 0
"""Update number of a round's groups: all of them are rolled out before its training."""


def main(job: FlywheelJob, report: Report) -> dict[str, Any]:
    """Result: the checkpoint's card; empty if the round stopped the flywheel, or on a rank other than 0.

    Raises:
        EnvServerError, EngineError: no episode got a desktop, or a response of the policy.
        TrainingError, StoreError, TableError: as train_sft.
    """
    checkpoint = run_sft(job, report, lambda trainer: _examples(job, trainer, report))
    return checkpoint_card(checkpoint) if checkpoint is not None else {}


def _examples(job: FlywheelJob, trainer: "SftTrainer", report: Report) -> Examples | None:
    """The round's own successes, and the demonstrations; None if the round stops the flywheel."""
    state, recipe = job.state, job.recipe
    groups = asyncio.run(_roll_out(job, trainer, report))
    measured = measure(groups, recipe.flywheel.threshold)
    metrics = {
        "flywheel_success_rate": measured.success_rate,
        "num_kept": float(measured.num_kept),
        "num_valid": float(measured.num_valid),
        "num_faults": float(measured.num_episodes - measured.num_valid),
    }
    report(Metrics(update=UPDATE, metrics=metrics))
    stopped = stop_reason(measured, job.previous, min_gain=recipe.flywheel.min_gain)
    if stopped:
        report(Warned(message=f"the flywheel stops: {stopped}"))
        return None
    parts = [_kept_examples(job, kept_episodes(groups, recipe.flywheel.threshold), trainer.processor)]
    if recipe.flywheel.with_demonstrations:
        parts.append(read_demonstrations(state, recipe, trainer.processor))
    items = join_examples(parts)
    counts = {"num_demonstrations": sum(map(len, parts[1:]))}
    return Examples(items=items, rows=items.rows, metrics=metrics, counts=counts)


def choose_tasks(tasks: Sequence[Task], settings: FlywheelSection) -> list[Task]:
    """Chooses the same tasks in every round, so that rounds are comparable."""
    if settings.max_tasks is None or len(tasks) <= settings.max_tasks:
        return list(tasks)
    chosen = random.Random(f"flywheel:{settings.seed}").sample(range(len(tasks)), settings.max_tasks)
    return [tasks[index] for index in sorted(chosen)]


def kept_episodes(groups: Sequence[RolloutGroup], threshold: float) -> list[Episode]:
    """The episodes whose raw task reward reaches the threshold; the shaped reward is ignored."""
    return [
        episode
        for group in groups
        for episode in group.valid_episodes
        if episode.reward is not None and episode.reward.task >= threshold
    ]


def measure(groups: Sequence[RolloutGroup], threshold: float) -> Measurement:
    return Measurement(
        num_valid=sum(len(group.valid_episodes) for group in groups),
        num_kept=len(kept_episodes(groups, threshold)),
        num_episodes=sum(len(group.episodes) for group in groups),
    )


async def _roll_out(job: FlywheelJob, trainer: "SftTrainer", report: Report) -> tuple[RolloutGroup, ...]:
    """Rolls out a group for each task. Graded episodes are read from the store. Writes all groups as one part at the
    end."""
    recipe = job.recipe
    flywheel = recipe.flywheel
    tasks = choose_tasks(load_train_tasks(job.state), flywheel)
    plan = GroupPlan(
        stage_key=job.checkpoint_id,
        update=UPDATE,
        group_size=flywheel.samples_per_task,
        checkpoint_id=job.checkpoint_id,
        stage=job.stage,
        parent_id=job.parent_id,
        sampling=sampling_params(recipe, temperature=flywheel.temperature, top_p=recipe.gspo.top_p, seed=flywheel.seed),
        run_ids=job.run_ids,
    )
    planned = [(task, plan, group_id_of(plan.stage_key, UPDATE, index)) for index, task in enumerate(tasks)]
    store = TrajectoryStore(job.state)
    is_over = read_measurement(job.state, job.checkpoint_id, threshold=flywheel.threshold) is not None
    known = known_episodes(store, planned, is_over=is_over)
    progress = _Progress(total=len(planned) * flywheel.samples_per_task, report=report)
    if len(known) == progress.total:
        groups = await gather_groups(planned, remembering(known, store, progress.on_episode, run_one=None))
    else:
        async with open_rollouts(
            job.actors,
            recipe=recipe,
            state=job.state,
            servers=job.servers,
            purpose=job.checkpoint_id,
            max_turns=recipe.agent.max_turns,
            folder=job.parent_folder,
            model=trainer.model if _samples_in_place(recipe, trainer) else None,
            processor=trainer.processor,
            engine_token=job.engine_token,
            report=report,
        ) as rollouts:
            if rollouts.uses_chat_api:
                raise EngineError(
                    f"the {rollouts.engine_name} engine returns text without token ids, so its responses cannot be "
                    "trained on: set engine.kind to transformers or sglang"
                )
            run_one = in_turn(rollouts.run_one, num_slots(recipe, job.servers))
            groups = await gather_groups(planned, remembering(known, store, progress.on_episode, run_one=run_one))
        require_services([episode for group in groups for episode in group.episodes])
    groups = tuple(judge_group(group, flywheel.threshold) for group in groups)
    await asyncio.to_thread(store.write_groups, job.checkpoint_id, groups, ())
    return groups


def _samples_in_place(recipe: Recipe, trainer: "SftTrainer") -> bool:
    """Nothing trains while a round samples, so the engine may use the trainer's own model as long as it is still the
    round's parent."""
    return recipe.engine.kind == "transformers" and trainer.shares_weights and not trainer.num_updates


def known_episodes(
    store: TrajectoryStore, planned: Sequence[tuple[Task, GroupPlan, str]], *, is_over: bool
) -> dict[str, Episode]:
    """The round's episodes that need not run again, by id. Faults are run again unless the rollouts are over
    (`is_over`); then faults are final too, so that a resumed training has the same examples."""
    ids = [
        plan_episode(plan, group_id, sample).episode_id
        for _, plan, group_id in planned
        for sample in range(plan.group_size)
    ]
    episodes = {part: found[0] for part, found in store.read_parts(ids).items()}
    return {part: episode for part, episode in episodes.items() if is_over or episode.outcome.is_valid}


@dataclass
class _Progress:
    total: int
    report: Report
    num_ended: int = 0
    num_successes: int = 0

    def on_episode(self, episode: Episode) -> None:
        self.num_ended += 1
        self.num_successes += episode.is_success
        note = f"{self.num_successes}/{self.num_ended} succeeded"
        self.report(Progress(done=self.num_ended, total=self.total, note=note))


def remembering(
    known: Mapping[str, Episode], store: TrajectoryStore, on_episode: OnEpisode, *, run_one: RunEpisode | None
) -> RunEpisode:
    """Returns known episodes, and runs and stores the others as separate parts. `run_one`: None if all are known."""
    writer = EpisodeWriter(store)

    async def run(task: Task, plan: EpisodePlan) -> Episode:
        episode = known.get(plan.episode_id)
        if episode is None:
            assert run_one is not None, f"{plan.episode_id} is not known"
            episode = await run_one(task, plan)
            await writer.write(episode)
        on_episode(episode)
        return episode

    return run


def judge_group(group: RolloutGroup, threshold: float) -> RolloutGroup:
    if kept_episodes([group], threshold):
        return group
    return replace(group, status=GroupStatus.NOT_KEPT, reason=f"no episode reached a raw task reward of {threshold:g}")


def _kept_examples(job: FlywheelJob, episodes: Sequence[Episode], processor: Any) -> LazyExamples:
    """Episodes with their own sampled tokens."""
    blobs = BlobStore(job.state.blobs)
    max_tokens, digest = job.recipe.agent.max_context_tokens, Renderer(processor).processor_digest

    def example(episode: Episode) -> Example:
        return online_replay_trajectories(
            _as_row(episode), episode, blobs.read, max_tokens=max_tokens, processor_digest=digest
        )

    makers = [partial(example, episode) for episode in episodes]
    return LazyExamples(makers, [TrainedRow.of(_as_row(episode)) for episode in episodes])


def _as_row(episode: Episode) -> ReplayRow:
    assert episode.reward is not None, f"{episode.episode_id} was kept without a grader's score"
    return ReplayRow(
        row_id=episode.episode_id,
        kind="episode",
        task_id=base_task_id(episode.task_id),
        original_task_id=episode.task_id,
        source_dataset=ONLINE,
        reward=episode.reward.task,
    )
