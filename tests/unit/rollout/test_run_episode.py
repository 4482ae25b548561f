"""One episode ends in exactly one outcome, a fault is never a zero reward, and the kept tokens are those sampled."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from osworld_pipeline.agent.model_inputs import build_model_inputs
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.domain.episode import Outcome, Parity, Reward
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import (
    ActionParseError,
    EngineError,
    EvaluatorError,
    NoCapacityError,
    RecipeError,
    ReplicaError,
    SetupError,
    TamperingError,
    TokenEndedError,
    TouchedError,
)
from osworld_pipeline.rollout.run_episode import EpisodePlan, EpisodeSettings, EpisodeTools, run_episode
from osworld_pipeline.rollout.trajectories import episode_trajectories

Tools = Callable[..., EpisodeTools]
DIALECT = load_dialect("slime")
TYPE = DIALECT.format("Type the command", {"action": "type", "text": "mv alpha bravo\n"})
DONE = DIALECT.format("Finish", {"action": "terminate", "status": "success"})
GIVE_UP = DIALECT.format("Give up", {"action": "terminate", "status": "failure"})


async def test_a_policy_that_solves_the_task_succeeds(
    task: Task, plan: EpisodePlan, settings: EpisodeSettings, make_tools: Tools, fake_desktop: Any
) -> None:
    desktop = fake_desktop()
    tools = make_tools([desktop], [TYPE, DONE])
    episode = await run_episode(task, plan, tools=tools, settings=settings)
    assert episode.outcome is Outcome.SUCCESS
    assert episode.error is None
    assert desktop.commands == ['pyautogui.write("mv alpha bravo\\n")', "DONE"]
    assert desktop.is_closed
    assert [step.signals.action_type for step in episode.steps] == ["type", "terminate"]
    assert episode.steps[0].signals.screen_changed
    assert episode.reward is not None
    assert episode.reward.task == 1.0
    assert episode.replica_id == "r0"
    assert episode.max_turns == 3
    assert set(episode.times_s) == {"reset", "model", "step", "evaluate", "total"}
    assert [step.policy_version for step in episode.steps] == [3, 3]
    assert episode.parity is None


async def test_an_episode_has_the_result_of_the_parity_probe_of_its_engine(
    task: Task, plan: EpisodePlan, settings: EpisodeSettings, make_tools: Tools, fake_desktop: Any
) -> None:
    parity = Parity(num_tokens=56, mean_diff=2e-7, max_diff=1e-6)
    tools = replace(make_tools([fake_desktop()], [DONE]), parity=parity)
    assert (await run_episode(task, plan, tools=tools, settings=settings)).parity == parity


@pytest.mark.parametrize(
    ("parent_id", "version", "expected"),
    [("sft-1", 3, ("gspo-1-u0003", 3)), ("sft-1", 0, ("sft-1", 0)), ("", 3, ("gspo-1", None))],
    ids=["after three updates", "before the first", "no training"],
)
async def test_an_episode_names_its_stage_its_checkpoint_and_the_weights_at_its_start(
    task: Task, plan: EpisodePlan, settings: EpisodeSettings, make_tools: Tools, fake_desktop: Any,
    parent_id: str, version: int, expected: tuple[str, int | None],
) -> None:  # fmt: skip
    tools = make_tools([fake_desktop()], [TYPE, DONE])
    tools.engine.policy_version = version  # type: ignore[misc]
    plan = replace(plan, checkpoint_id="gspo-1", stage="gspo_phase1", parent_id=parent_id)
    episode = await run_episode(task, plan, tools=tools, settings=settings)
    assert (episode.checkpoint_id, episode.stage) == ("gspo-1", "gspo_phase1")
    assert (episode.weights_id, episode.weights_update) == expected


async def test_the_kept_tokens_are_the_prompts_the_engine_saw_and_the_responses_it_gave(
    task: Task, plan: EpisodePlan, settings: EpisodeSettings, make_tools: Tools, fake_desktop: Any, renderer: Renderer
) -> None:
    tools = make_tools([fake_desktop()], [TYPE, DONE])
    episode = await run_episode(task, plan, tools=tools, settings=settings)
    requests = tools.engine.requests  # type: ignore[attr-defined]
    done_ids = tuple(renderer.encode(DONE))
    (sequence,) = episode.sequences
    assert sequence.token_ids == requests[1].token_ids + done_ids
    assert requests[1].token_ids[: len(requests[0].token_ids)] == requests[0].token_ids
    assert sum(sequence.response_mask) == len(renderer.encode(TYPE)) + len(done_ids)
    assert requests[0].sampling.seed != requests[1].sampling.seed
    assert [step.prompt_num_tokens for step in episode.steps] == [len(request.token_ids) for request in requests]
    (trajectory,) = episode_trajectories(episode, tools.sink.blobs.__getitem__)  # type: ignore[attr-defined]
    assert trajectory.images == requests[1].images
    build_model_inputs(renderer.processor, [(trajectory.token_ids, trajectory.images)])
    assert trajectory.sampled_logprobs is not None
    assert {
        logprob for logprob, flag in zip(trajectory.sampled_logprobs, trajectory.response_mask, strict=True) if flag
    } == {-0.5}
    assert sequence.policy_versions == tuple(3 if flag else -1 for flag in sequence.response_mask)
    assert sequence.image_steps == (0, 1)
    ids = [renderer.image_ids(width=one.screenshot_width, height=one.screenshot_height) for one in episode.steps]
    assert episode.image_num_tokens == sum(len(one) - 2 for one in ids), "without the marks of beginning and end"


@pytest.mark.parametrize("when", ["reset", "act", "score"])
async def test_the_end_of_the_runs_token_ends_the_program_and_is_not_an_outcome_of_an_episode(
    task: Task, plan: EpisodePlan, settings: EpisodeSettings, make_tools: Tools, fake_desktop: Any, when: str
) -> None:
    desktop = fake_desktop(faults={when: TokenEndedError("the token of this run has ended")})
    with pytest.raises(TokenEndedError) as caught:
        await run_episode(task, plan, tools=make_tools([desktop], [TYPE, DONE]), settings=settings)
    assert caught.value.is_retryable
    assert desktop.is_closed


async def test_giving_up_is_a_failure_with_the_graders_score(
    task: Task, plan: EpisodePlan, settings: EpisodeSettings, make_tools: Tools, fake_desktop: Any
) -> None:
    desktop = fake_desktop(reward=0.0)
    episode = await run_episode(task, plan, tools=make_tools([desktop], [GIVE_UP]), settings=settings)
    assert (episode.outcome, desktop.commands) == (Outcome.FAILURE, ["FAIL"])
    assert episode.reward is not None
    assert episode.reward.task == 0.0


@pytest.mark.parametrize(("reward", "outcome"), [(0.0, Outcome.TRUNCATED), (1.0, Outcome.SUCCESS)])
async def test_at_the_turn_limit_the_grader_still_scores_the_episode(
    task: Task,
    plan: EpisodePlan,
    settings: EpisodeSettings,
    make_tools: Tools,
    fake_desktop: Any,
    reward: float,
    outcome: Outcome,
) -> None:
    tools = make_tools([fake_desktop(reward=reward)], [TYPE])
    episode = await run_episode(task, plan, tools=tools, settings=settings)
    assert (episode.outcome, len(episode.steps)) == (outcome, 3)


async def test_a_full_context_truncates_before_the_observation_that_does_not_fit(
    task: Task, plan: EpisodePlan, settings: EpisodeSettings, make_tools: Tools, fake_desktop: Any
) -> None:
    tools = make_tools([fake_desktop(reward=0.0)], [TYPE])
    whole = await run_episode(task, plan, tools=tools, settings=settings)
    limit = whole.num_tokens - 1
    tight = replace(settings, agent=settings.agent.model_copy(update={"max_context_tokens": limit}))
    tools = make_tools([fake_desktop(reward=0.0)], [TYPE])
    episode = await run_episode(task, plan, tools=tools, settings=tight)
    assert episode.outcome is Outcome.TRUNCATED
    assert 0 < len(episode.steps) < 3
    assert episode.num_tokens <= limit
    episode_trajectories(episode, tools.sink.blobs.__getitem__)  # type: ignore[attr-defined]


async def test_a_context_too_small_for_a_first_turn_is_an_error_of_the_recipe(
    task: Task, plan: EpisodePlan, settings: EpisodeSettings, make_tools: Tools, fake_desktop: Any
) -> None:
    desktop = fake_desktop()
    tight = replace(settings, agent=settings.agent.model_copy(update={"max_context_tokens": 100}))
    with pytest.raises(RecipeError, match=r"the first turn, response included, is \d+ tokens longer than the context"):
        await run_episode(task, plan, tools=make_tools([desktop], [DONE]), settings=tight)
    assert desktop.is_closed


async def test_an_unreadable_response_runs_no_action_and_the_model_gets_the_error(
    task: Task, plan: EpisodePlan, settings: EpisodeSettings, make_tools: Tools, fake_desktop: Any
) -> None:
    desktop = fake_desktop()
    tools = make_tools([desktop], ["hm, no idea", DONE])
    episode = await run_episode(task, plan, tools=tools, settings=settings)
    assert episode.outcome is Outcome.SUCCESS
    assert desktop.commands == ["DONE"]
    first, second = episode.steps
    assert (first.action, first.command, first.signals.action_parsed) == (None, None, False)
    assert (first.signals.action_type, first.signals.screen_diff) == ("unknown", 0.0)
    assert second.observation_text == "[Last Action Result]\nerror: no action found in the response"
    assert first.screenshot_sha256 == second.screenshot_sha256


async def test_an_action_the_desktop_refuses_is_a_step_not_a_fault(
    task: Task, plan: EpisodePlan, settings: EpisodeSettings, make_tools: Tools, fake_desktop: Any
) -> None:
    desktop = fake_desktop(reward=0.0, faults={"act": ActionParseError("outside the screen")})
    episode = await run_episode(task, plan, tools=make_tools([desktop], [TYPE]), settings=settings)
    assert episode.outcome is Outcome.TRUNCATED
    signals = episode.steps[0].signals
    assert (signals.action_parsed, signals.action_executed, signals.action_error) == (True, False, "outside the screen")


FAULTS = [
    ({"score": EvaluatorError("the grader crashed")}, [DONE], Outcome.GRADER_FAULT, "the grader crashed", 0),
    ({}, [EngineError("out of memory")], Outcome.POLICY_FAULT, "out of memory", 0),
    ({"act": ReplicaError("the desktop died")}, [TYPE], Outcome.ENV_FAULT, "the desktop died", 2),
    ({"reset": SetupError("no such file")}, [TYPE], Outcome.ENV_FAULT, "no such file", 2),
    ({"reset": NoCapacityError("all busy")}, [TYPE], Outcome.ENV_FAULT, "all busy", 0),
]


@pytest.mark.parametrize(("faults", "answers", "outcome", "error", "attempt"), FAULTS)
async def test_a_fault_is_an_outcome_without_reward(
    task: Task,
    plan: EpisodePlan,
    settings: EpisodeSettings,
    make_tools: Tools,
    fake_desktop: Any,
    faults: dict[str, Exception],
    answers: list[Any],
    outcome: Outcome,
    error: str,
    attempt: int,
) -> None:
    desktops = [fake_desktop(faults=faults) for _ in range(3)]
    episode = await run_episode(task, plan, tools=make_tools(desktops, answers), settings=settings)
    assert (episode.outcome, episode.error, episode.attempt) == (outcome, error, attempt)
    assert episode.reward is None
    assert not episode.outcome.is_valid
    assert all(desktop.is_closed for desktop in desktops[: attempt + 1])


async def test_tampering_is_a_failure_with_zero_reward_and_no_retry(
    task: Task, plan: EpisodePlan, settings: EpisodeSettings, make_tools: Tools, fake_desktop: Any
) -> None:
    desktop = fake_desktop(faults={"act": TamperingError("it ended its X server")})
    episode = await run_episode(task, plan, tools=make_tools([desktop, fake_desktop()], [TYPE]), settings=settings)
    assert (episode.outcome, episode.error, episode.attempt) == (Outcome.TAMPERING, "it ended its X server", 0)
    assert episode.outcome.is_valid
    assert episode.reward == Reward(task=0.0)
    assert len(episode.steps) == 1
    assert sum(episode.sequences[0].response_mask) > 0, "what it did is trained on"


@pytest.mark.parametrize("call", ["act", "score"])
async def test_a_touched_episode_is_recorded_without_a_reward_and_not_trained_on(
    task: Task, plan: EpisodePlan, settings: EpisodeSettings, make_tools: Tools, fake_desktop: Any, call: str
) -> None:
    desktop = fake_desktop(faults={call: TouchedError("a person sent 3 inputs", 3)})
    tools = make_tools([desktop, fake_desktop()], [TYPE, DONE])
    episode = await run_episode(task, plan, tools=tools, settings=settings)
    assert (episode.outcome, episode.error, episode.attempt) == (Outcome.TOUCHED, "a person sent 3 inputs", 0)
    assert (episode.num_person_inputs, episode.reward, episode.outcome.is_valid) == (3, None, False)
    assert episode.steps
    with pytest.raises(ValueError, match="is not trained on"):
        episode_trajectories(episode, tools.sink.blobs.__getitem__)  # type: ignore[attr-defined]


async def test_a_dead_replica_is_replaced_and_the_attempt_is_kept(
    task: Task, plan: EpisodePlan, settings: EpisodeSettings, make_tools: Tools, fake_desktop: Any
) -> None:
    dead = fake_desktop(faults={"act": ReplicaError("gone")}, replica_id="r0")
    episode = await run_episode(
        task, plan, tools=make_tools([dead, fake_desktop(replica_id="r1")], [DONE]), settings=settings
    )
    assert (episode.outcome, episode.attempt, episode.replica_id) == (Outcome.SUCCESS, 1, "r1")
    assert len(episode.steps) == 1
    assert dead.is_closed


async def test_the_faults_of_earlier_attempts_are_kept_with_the_episode(
    task: Task, plan: EpisodePlan, settings: EpisodeSettings, make_tools: Tools, fake_desktop: Any
) -> None:
    broken = fake_desktop(faults={"reset": SetupError("no such file")})
    dead = fake_desktop(faults={"act": ReplicaError("gone")}, replica_id="r1")
    tools = make_tools([broken, dead, fake_desktop(replica_id="r2")], [DONE])
    episode = await run_episode(task, plan, tools=tools, settings=settings)
    assert (episode.outcome, episode.error, episode.attempt) == (Outcome.SUCCESS, None, 2)
    assert episode.earlier_faults == ("env_fault: no such file", "env_fault on r1: gone")
    assert tools.engine.forgotten == ["e1-a0", "e1-a1", "e1-a2"]  # type: ignore[attr-defined]


async def test_a_prompt_that_was_never_answered_is_not_kept(
    task: Task, plan: EpisodePlan, settings: EpisodeSettings, make_tools: Tools, fake_desktop: Any, renderer: Renderer
) -> None:
    tools = make_tools([fake_desktop()], [TYPE, EngineError("out of memory")])
    episode = await run_episode(task, plan, tools=tools, settings=settings)
    (first, _) = tools.engine.requests  # type: ignore[attr-defined]
    assert (episode.outcome, len(episode.steps)) == (Outcome.POLICY_FAULT, 1)
    (sequence,) = episode.sequences
    assert sequence.token_ids == first.token_ids + tuple(renderer.encode(TYPE))
    assert sequence.image_steps == (0,)


async def test_a_slow_turn_is_a_timeout(
    task: Task, plan: EpisodePlan, settings: EpisodeSettings, make_tools: Tools, fake_desktop: Any
) -> None:
    quick = replace(settings, turn_timeout_s=0.1)
    episode = await run_episode(task, plan, tools=make_tools([fake_desktop()], [5.0]), settings=quick)
    assert (episode.outcome, episode.error) == (Outcome.TIMEOUT, "turn 0 took longer than 0.1 s")
    assert episode.reward is None


async def test_a_slow_episode_is_a_timeout(
    task: Task, plan: EpisodePlan, settings: EpisodeSettings, make_tools: Tools, fake_desktop: Any
) -> None:
    quick = replace(settings, episode_timeout_s=0.1)
    episode = await run_episode(task, plan, tools=make_tools([fake_desktop()], [5.0]), settings=quick)
    assert (episode.outcome, episode.error) == (Outcome.TIMEOUT, "the episode took longer than 0.1 s")


async def test_a_sampled_image_placeholder_is_a_policy_fault(
    task: Task, plan: EpisodePlan, settings: EpisodeSettings, make_tools: Tools, fake_desktop: Any, renderer: Renderer
) -> None:
    tools = make_tools([fake_desktop()], [DONE])
    engine = tools.engine

    class PlaceholderEngine:
        name = "fake"
        uses_chat_api = False
        policy_version = 0
        load_weights = engine.load_weights
        forget = engine.forget
        health = engine.health
        close = engine.close

        async def generate(self, request: Any) -> Any:
            return replace(await engine.generate(request), token_ids=(renderer.image_id,), logprobs=(-1.0,))

    tools = replace(tools, engine=PlaceholderEngine())
    episode = await run_episode(task, plan, tools=tools, settings=settings)
    assert episode.outcome is Outcome.POLICY_FAULT
    assert "image placeholder" in str(episode.error)


async def test_a_cancelled_episode_releases_its_desktop(
    task: Task, plan: EpisodePlan, settings: EpisodeSettings, make_tools: Tools, fake_desktop: Any
) -> None:
    desktop = fake_desktop()
    running = asyncio.create_task(run_episode(task, plan, tools=make_tools([desktop], [5.0]), settings=settings))
    await asyncio.sleep(0.2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert desktop.is_closed
