"""Fakes of the interfaces of a rollout: desktop, policy engine, sink."""

import asyncio
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.digest import digest_bytes
from osworld_pipeline.domain.episode import Episode, EpisodePurpose, SamplingParams
from osworld_pipeline.domain.group import RolloutGroup
from osworld_pipeline.domain.observation import Observation
from osworld_pipeline.domain.replay import Injection
from osworld_pipeline.domain.task import Task
from osworld_pipeline.protocols import DesktopInfo, GenerateRequest, GenerateResult
from osworld_pipeline.recipes.schema import AgentSection, DesktopSection, RewardSection
from osworld_pipeline.rollout.run_episode import EpisodePlan, EpisodeSettings, EpisodeTools


class FakeDesktop:
    """A desktop whose screen gets another grey with every action. `faults` maps a method to the error it raises."""

    def __init__(
        self, *, reward: float = 1.0, faults: dict[str, Exception] | None = None, replica_id: str = "r0"
    ) -> None:
        self.commands: list[str] = []
        self.is_closed = False
        self._reward = reward
        self._faults = faults or {}
        self._replica_id = replica_id

    async def reset(self, task: Task, *, record_id: str = "") -> tuple[Observation, DesktopInfo]:
        self._fail("reset")
        info = DesktopInfo(replica_id=self._replica_id, provider="fake", image_digest="d", grader_version="g")
        return self._observe(), info

    async def act(self, command: str, *, pause_s: float, note: str = "") -> Observation:
        self._fail("act")
        self.commands.append(command)
        await asyncio.sleep(0)
        return self._observe()

    async def score(self) -> float:
        self._fail("score")
        return self._reward

    async def close(self) -> None:
        self.is_closed = True

    def _fail(self, method: str) -> None:
        if method in self._faults:
            raise self._faults[method]

    def _observe(self) -> Observation:
        buffer = io.BytesIO()
        Image.new("RGB", (64, 64), (40 * len(self.commands),) * 3).save(buffer, format="PNG")
        return Observation(screenshot=buffer.getvalue())


class FakeEngine:
    """Answers with the given texts in turn, then repeats the last one. An exception is raised; a float is slept."""

    name = "fake"
    uses_chat_api = False
    policy_version = 3

    def __init__(self, renderer: Renderer, answers: Sequence[str | Exception | float]) -> None:
        self.requests: list[GenerateRequest] = []
        self.forgotten: list[str] = []
        self._renderer = renderer
        self._answers = answers

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        answer = self._answers[min(len(self.requests), len(self._answers) - 1)]
        self.requests.append(request)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, float):
            await asyncio.sleep(answer)
            answer = ""
        ids = tuple(self._renderer.encode(answer)) or (self._renderer.im_end_id,)
        return GenerateResult(
            token_ids=ids,
            logprobs=(-0.5,) * len(ids),
            text=answer,
            policy_version=self.policy_version,
            finish_reason="stop",
        )

    async def load_weights(self, path: Path, *, policy_version: int) -> None:
        raise AssertionError("no rollout loads weights")

    async def forget(self, episode_id: str) -> None:
        self.forgotten.append(episode_id)

    async def health(self) -> None: ...

    async def close(self) -> None: ...


class MemorySink:
    """Keeps blobs in a dict."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}

    def write_blob(self, data: bytes, *, suffix: str) -> str:
        assert suffix == ".png"
        self.blobs[digest_bytes(data)] = data
        return digest_bytes(data)

    def write_episodes(self, part: str, episodes: Sequence[Episode]) -> None: ...

    def write_groups(self, part: str, groups: Sequence[RolloutGroup], injections: Sequence[Injection]) -> None: ...


@pytest.fixture(scope="session")
def renderer(processor: Any) -> Renderer:
    return Renderer(processor)


@pytest.fixture
def task() -> Task:
    config = {"id": "t1", "instruction": "Rename alpha to bravo.", "evaluator": {"func": "exact_match"}}
    return Task.from_config(config, domain="os")


@pytest.fixture
def settings() -> EpisodeSettings:
    return EpisodeSettings(
        agent=AgentSection(max_turns=3, max_response_tokens=64, max_context_tokens=2048, system_prompt="short"),
        desktop=DesktopSection(num_replicas=2, pause_s=0.0, require_a11y_tree=False),
        reward=RewardSection(),
        max_turns=3,
        episode_timeout_s=20,
        turn_timeout_s=10,
        max_env_attempts=3,
    )


@pytest.fixture
def sampling() -> SamplingParams:
    return SamplingParams(temperature=0.8, max_new_tokens=128, seed=7)


@pytest.fixture
def plan(sampling: SamplingParams) -> EpisodePlan:
    return EpisodePlan(
        episode_id="e1", purpose=EpisodePurpose.TRAIN, checkpoint_id="c1", sampling=sampling, group_id="g1", update=0
    )


@pytest.fixture
def make_tools(renderer: Renderer) -> Callable[..., EpisodeTools]:
    """Tools around fake desktops, handed out in turn, and a fake engine's answers."""

    def make(desktops: Sequence[FakeDesktop], answers: Sequence[str | Exception | float]) -> EpisodeTools:
        waiting = iter(desktops)
        return EpisodeTools(
            desktop_factory=lambda: next(waiting),
            engine=FakeEngine(renderer, answers),
            renderer=renderer,
            sink=MemorySink(),
        )

    return make


@pytest.fixture
def fake_desktop() -> type[FakeDesktop]:
    return FakeDesktop
