"""Rolls out a checkpoint, an endpoint or the suite's oracles on tasks, `num_samples` times each, and keeps all
episodes.

The loop is the flywheel's: each graded episode is stored as its own part and not run again; faults are run again.
"""

import asyncio
from collections import Counter
from functools import partial
from typing import Any

from osworld_pipeline.agent.images import fit_size
from osworld_pipeline.agent.processor import load_processor
from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.dialects.actions import move_points
from osworld_pipeline.dialects.coordinates import from_screen
from osworld_pipeline.domain.checkpoint import Stage
from osworld_pipeline.domain.episode import Episode
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.rollout.engines.scripted import ScriptedEngine
from osworld_pipeline.rollout.run_group import gather_groups, in_turn, plan_episode, require_services
from osworld_pipeline.runs.checkpoints.external import require_unchanged
from osworld_pipeline.runs.checkpoints.ids import recipe_suite
from osworld_pipeline.runs.collect.plan import (
    ORACLE,
    CollectionJob,
    CollectionPlan,
    load_collected,
    plan_collection,
    require_oracles,
)
from osworld_pipeline.runs.evaluate.evaluate import policy_of
from osworld_pipeline.runs.flywheel.flywheel import known_episodes, remembering
from osworld_pipeline.runs.messages import Progress, Report
from osworld_pipeline.runs.rollouts.rollouts import open_rollouts
from osworld_pipeline.runs.rollouts.session import num_slots
from osworld_pipeline.store import TrajectoryStore


def main(job: CollectionJob, report: Report) -> dict[str, Any]:
    """Result: the number of episodes by outcome.

    Raises:
        DatasetError: there are no such tasks, or one of them has no oracle.
        EnvServerError, EngineError: no episode got a desktop, or a response of the policy.
        StoreError: the checkpoint has changed since it was added.
    """
    plan = plan_collection(
        job.recipe,
        job.checkpoint.checkpoint_id,
        load_collected(job.state, job.recipe, job.tasks),
        num_samples=job.num_samples,
        temperature=job.temperature,
        run_ids=job.run_ids,
        stage=job.checkpoint.stage,
    )
    return asyncio.run(_collect(plan, job, report))


async def _collect(plan: CollectionPlan, job: CollectionJob, report: Report) -> dict[str, Any]:
    recipe, state, servers = job.recipe, job.state, job.servers
    store = TrajectoryStore(state)
    known = known_episodes(store, plan.groups, is_over=False)
    outcomes: Counter[str] = Counter()
    total = len(plan.episode_ids)

    def report_progress(episode: Episode | None = None) -> None:
        if episode is not None:
            outcomes[str(episode.outcome)] += 1
        note = f"{outcomes['success']} successes"
        report(Progress(done=sum(outcomes.values()), total=total, note=note))

    report_progress()
    if len(known) == total:
        await gather_groups(plan.groups, remembering(known, store, report_progress, run_one=None))
        return dict(outcomes)
    policy = await _policy(plan, job)
    async with open_rollouts(
        job.actors,
        **policy,
        state=state,
        servers=servers,
        purpose=plan.stage_key,
        max_turns=recipe.agent.max_turns,
        engine_token=job.engine_token,
        report=report,
    ) as rollouts:
        run_one = in_turn(rollouts.run_one, num_slots(recipe, servers))
        groups = await gather_groups(plan.groups, remembering(known, store, report_progress, run_one=run_one))
    require_services([episode for group in groups for episode in group.episodes])
    return dict(outcomes)


async def _policy(plan: CollectionPlan, job: CollectionJob) -> dict[str, Any]:
    """The policy's arguments for `open_rollouts`, including its recipe."""
    policy = job.checkpoint
    if policy.checkpoint_id == ORACLE:
        require_oracles(job.recipe, [task for task, _, _ in plan.groups])
        return {"recipe": job.recipe, "engine": ScriptedEngine(oracle_scripts(plan, job.recipe))}
    recipe, folder = policy_of(policy, job.recipe, job.state)
    if folder is None:
        return {"recipe": recipe}
    if policy.stage == Stage.EXTERNAL:
        await asyncio.to_thread(require_unchanged, policy.checkpoint_id, folder)
    return {"recipe": recipe, "folder": folder, "processor": await asyncio.to_thread(load_processor, folder)}


def oracle_scripts(plan: CollectionPlan, recipe: Recipe) -> dict[str, list[str]]:
    """The responses of a policy that solves the tasks, by planned episode, in the recipe's dialect and for the images
    that the policy would see."""
    suite = recipe_suite(recipe)
    oracles = {item.task.task_id: item.oracle for item in (*suite.train, *suite.heldout)}
    dialect = load_dialect(recipe.agent.dialect, recipe.agent.coordinate_space)
    screen = (recipe.desktop.screen_width, recipe.desktop.screen_height)
    image = fit_size(*screen, recipe.agent.max_pixels)
    move = partial(from_screen, space=dialect.coordinate_space, image=image, screen=screen)
    scripts = {}
    for task, group, group_id in plan.groups:
        said = [dialect.format(step.description, move_points(step.arguments, move)) for step in oracles[task.task_id]]
        scripts |= {plan_episode(group, group_id, sample).episode_id: said for sample in range(group.group_size)}
    return scripts
