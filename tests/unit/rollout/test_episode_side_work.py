"""The work of an episode other than calls to model and desktop: it is done while the model generates and is never lost.
A server that dies during an episode does not end the episode."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.domain.episode import Outcome
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import EngineError, StoreError
from osworld_pipeline.protocols import GenerateRequest, GenerateResult
from osworld_pipeline.rollout.env_answers import UnreachableError
from osworld_pipeline.rollout.run_episode import EpisodePlan, EpisodeSettings, EpisodeTools, run_episode

Tools = Callable[..., EpisodeTools]
DIALECT = load_dialect("slime")
TYPE = DIALECT.format("Type the command", {"action": "type", "text": "mv alpha bravo\n"})
DONE = DIALECT.format("Finish", {"action": "terminate", "status": "success"})


class WaitingSink:
    """Stores nothing before the model has been asked, and then raises `error` if there is one."""

    def __init__(self, error: Exception | None = None) -> None:
        self.is_asked = threading.Event()
        self.num_stored = 0
        self._error = error

    def write_blob(self, data: bytes, *, suffix: str) -> str:
        assert self.is_asked.wait(20), "the model was not asked before the image was stored"
        if self._error is not None:
            raise self._error
        self.num_stored += 1
        return ""

    def write_episodes(self, part: str, episodes: object) -> None: ...

    def write_groups(self, part: str, groups: object, injections: object) -> None: ...


def asking(engine: Any, sink: WaitingSink) -> Any:
    answer = engine.generate

    async def generate(request: GenerateRequest) -> GenerateResult:
        sink.is_asked.set()
        return await answer(request)

    engine.generate = generate
    return engine


async def test_the_model_does_not_wait_for_the_disk_and_every_image_is_stored_in_the_end(
    task: Task, plan: EpisodePlan, settings: EpisodeSettings, make_tools: Tools, fake_desktop: Any
) -> None:
    sink, tools = WaitingSink(), make_tools([fake_desktop()], [TYPE, TYPE, DONE])
    tools = replace(tools, engine=asking(tools.engine, sink), sink=sink)
    episode = await run_episode(task, plan, tools=tools, settings=settings)
    assert (episode.outcome, len(episode.steps), sink.num_stored) == (Outcome.SUCCESS, 3, 3)
    assert [step.step_index for step in episode.steps] == [0, 1, 2]


@pytest.mark.parametrize("answers", [[TYPE, DONE], [EngineError("out of memory")]])
async def test_a_full_disk_ends_the_run_for_any_behaviour_of_the_model(
    task: Task, plan: EpisodePlan, settings: EpisodeSettings, make_tools: Tools, fake_desktop: Any, answers: list[Any]
) -> None:
    sink, desktop = WaitingSink(StoreError("no disk space left")), fake_desktop()
    tools = make_tools([desktop], answers)
    tools = replace(tools, engine=asking(tools.engine, sink), sink=sink)
    with pytest.raises(StoreError, match="no disk space left"):
        await run_episode(task, plan, tools=tools, settings=settings)
    assert desktop.is_closed


async def test_an_episode_whose_server_dies_is_run_again_on_another_server(
    task: Task, plan: EpisodePlan, settings: EpisodeSettings, make_tools: Tools, fake_desktop: Any
) -> None:
    gone = fake_desktop(faults={"act": UnreachableError("no env server answers at a")}, replica_id="a")
    tools = make_tools([gone, fake_desktop(replica_id="b")], [DONE])
    episode = await run_episode(task, plan, tools=tools, settings=settings)
    assert (episode.outcome, episode.attempt, episode.replica_id) == (Outcome.SUCCESS, 1, "b")
    assert episode.earlier_faults == ("env_fault on a: no env server answers at a",)


async def test_a_server_that_was_never_reachable_is_not_asked_again(
    task: Task, plan: EpisodePlan, settings: EpisodeSettings, make_tools: Tools, fake_desktop: Any
) -> None:
    absent = fake_desktop(faults={"reset": UnreachableError("no env server answers at a")})
    episode = await run_episode(task, plan, tools=make_tools([absent], [DONE]), settings=settings)
    assert (episode.outcome, episode.attempt) == (Outcome.ENV_FAULT, 0)


async def test_an_engine_with_a_chat_api_needs_no_renderer_and_leaves_no_tokens(
    task: Task, plan: EpisodePlan, settings: EpisodeSettings, make_tools: Tools, fake_desktop: Any
) -> None:
    class Words:
        name = "words"
        uses_chat_api = True
        policy_version = 0

        async def generate(self, request: GenerateRequest) -> GenerateResult:
            assert request.turns[0].role == "system"
            assert (request.token_ids, len(request.turns[-1].images)) == ((), 1)
            return GenerateResult(text=DONE, policy_version=0, finish_reason="stop")

        async def forget(self, episode_id: str) -> None: ...

    tools = replace(make_tools([fake_desktop()], [DONE]), engine=Words(), renderer=None)  # type: ignore[arg-type]
    episode = await run_episode(task, plan, tools=tools, settings=settings)
    assert (episode.outcome, episode.sequences, episode.processor_digest) == (Outcome.SUCCESS, (), "")
