"""Evaluates checkpoints on a suite of tasks, by default the recipe's held-out tasks. Episodes finished by a killed run
are not run again."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from osworld_pipeline.agent.processor import load_processor
from osworld_pipeline.domain.checkpoint import Stage
from osworld_pipeline.domain.episode import Episode
from osworld_pipeline.domain.grounds import Grounds, has_other_grounds
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.task import Task
from osworld_pipeline.evaluation.suite_files import EvalSuite
from osworld_pipeline.policy_servers.launch import SharedServers
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.rollout.run_episode import EpisodePlan, RunEpisode
from osworld_pipeline.rollout.run_group import OnEpisode, gather_episodes, in_turn, require_services
from osworld_pipeline.runs.checkpoints.endpoints import Endpoint, is_address
from osworld_pipeline.runs.checkpoints.external import require_unchanged
from osworld_pipeline.runs.evaluate.plan import EvaluationJob, load_tasks, plan_evaluation
from osworld_pipeline.runs.job import Policy
from osworld_pipeline.runs.messages import Progress, Report, Warned
from osworld_pipeline.runs.rollouts.episode_writer import EpisodeWriter
from osworld_pipeline.runs.rollouts.rollouts import open_rollouts
from osworld_pipeline.runs.rollouts.session import num_slots
from osworld_pipeline.store import TrajectoryStore


def main(job: EvaluationJob, report: Report) -> dict[str, Any]:
    """Result: the figures by checkpoint id."""
    suite = load_tasks(job.state, job.recipe, job.tasks)
    return asyncio.run(_evaluate_all(_Evaluation(job=job, suite=suite, report=report)))


@dataclass(frozen=True, kw_only=True)
class _Evaluation:
    """What all checkpoints of a job share."""

    job: EvaluationJob
    suite: EvalSuite
    report: Report


async def _evaluate_all(evaluation: _Evaluation) -> dict[str, Any]:
    """Evaluates the checkpoints in sequence."""
    async with SharedServers(evaluation.job.state) as launched:
        return {one.checkpoint_id: await _evaluate(one, evaluation, launched) for one in evaluation.job.checkpoints}


async def _evaluate(policy: Policy, evaluation: _Evaluation, launched: SharedServers) -> dict[str, Any]:
    job = evaluation.job
    state = job.state
    recipe, folder = policy_of(policy, job.recipe, state)
    plan = plan_evaluation(recipe, policy.checkpoint_id, policy.run_ids, suite=evaluation.suite, stage=policy.stage)
    finished = plan.finished(state)
    missing = [planned for part, planned in plan.episodes.items() if part not in finished]
    episodes, again = list(finished.values()), frozenset[str]()

    def report_progress() -> None:
        note = f"{sum(episode.is_success for episode in episodes)} successes"
        stage = f"evaluate {policy.stage}"
        evaluation.report(Progress(done=len(episodes), total=len(plan.episodes), note=note, stage=stage))

    def on_episode(episode: Episode) -> None:
        episodes.append(episode)
        report_progress()

    report_progress()
    if missing:
        if folder is not None and policy.stage == Stage.EXTERNAL:
            await asyncio.to_thread(require_unchanged, policy.checkpoint_id, folder)
        if folder is not None and job.actors is None:
            recipe = await launched.named_in(recipe, folder)
        async with open_rollouts(
            job.actors,
            recipe=recipe,
            state=state,
            servers=job.servers,
            purpose=f"{plan.stage_key}-{plan.suite_digest[:12]}",
            max_turns=recipe.evaluation.max_turns,
            folder=folder,
            processor=None if folder is None else await asyncio.to_thread(load_processor, folder),
            engine_token=job.engine_token,
            report=evaluation.report,
        ) as rollouts:
            again = on_other_grounds(finished, rollouts.grounds, evaluation.report)
            episodes[:] = [episode for part, episode in finished.items() if part not in again]
            report_progress()
            missing += [plan.episodes[part] for part in again]
            store, slots = TrajectoryStore(state), num_slots(recipe, job.servers)
            require_services(await run_and_store(missing, rollouts.run_one, store, on_episode, num_slots=slots))
    return {
        "num_episodes": len(episodes),
        "num_reused": len(finished) - len(again),
        "num_valid": sum(episode.outcome.is_valid for episode in episodes),
        "num_success": sum(episode.is_success for episode in episodes),
    }


def on_other_grounds(
    finished: Mapping[str, Episode], grounds: frozenset[Grounds] | None, report: Report
) -> frozenset[str]:
    """Names of the finished episodes that were graded on another desktop image or by another grader than those of the
    servers (`grounds`): together with new episodes they would mix two scores. Reports a warning if there are some.
    Empty, also with a warning, if the servers differ among themselves."""
    if grounds is not None and len(grounds) > 1:
        named = "; ".join(sorted(map(str, grounds)))
        message = f"the env servers differ in desktop image or grader ({named}): this evaluation will have no rank"
        report(Warned(message=message))
        return frozenset()
    again = frozenset(part for part, episode in finished.items() if has_other_grounds(episode, grounds))
    if again:
        message = f"{len(again)} episodes were graded on another desktop image or by another grader: they run again"
        report(Warned(message=message))
    return again


def policy_of(policy: Policy, recipe: Recipe, state: StateDir) -> tuple[Recipe, Path | None]:
    """The recipe with the engine that samples this checkpoint, and its weights if they are a folder."""
    path = policy.path
    if not path:
        return recipe, None
    return (Endpoint.parse(path).sampled_by(recipe), None) if is_address(path) else (recipe, state.root / path)


async def run_and_store(
    missing: Sequence[tuple[Task, EpisodePlan]],
    run_one: RunEpisode,
    store: TrajectoryStore,
    on_episode: OnEpisode,
    *,
    num_slots: int,
) -> tuple[Episode, ...]:
    """Runs the episodes, at most `num_slots` at a time; each is stored as a part of its own before `on_episode`. A
    desktop does not wait for the store. The returned episodes have no steps and tokens, because those of 100,000
    episodes would take gigabytes."""
    run_in_turn, writer = in_turn(run_one, num_slots), EpisodeWriter(store)

    async def run(task: Task, plan: EpisodePlan) -> Episode:
        episode = await run_in_turn(task, plan)
        await writer.write(episode)
        ended = replace(episode, steps=(), sequences=())
        on_episode(ended)
        return ended

    return await gather_episodes(missing, run)
