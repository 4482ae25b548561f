"""A server that joins during a run is compared before its first response is used: a good one is admitted, a defective
one is refused by name, and the episodes of the others continue."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fake_policy_server import Answer
from sampling_servers import Place, SamplingServer, make_adapter, make_other, open_place, recipe_of
from sglang_samples import text_request

from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.errors import EngineError
from osworld_pipeline.protocols import GenerateRequest, GenerateResult
from osworld_pipeline.rollout import parity_questions
from osworld_pipeline.rollout.engines import sglang_server
from osworld_pipeline.rollout.engines.sglang import SglangEngine

NUM_TOKENS = 2
NUM_REQUESTS = 7
"""Of a comparison to the server that joins: turns of the conversations."""


@pytest.fixture
def place(tiny_folder: Path, tmp_path: Path, processor: Any) -> Iterator[Place]:
    with open_place(tiny_folder, tmp_path / "state", processor) as opened:
        yield opened


@pytest.fixture(autouse=True)
def probe_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the probe, because the stub computes the whole prompt again for each token."""
    monkeypatch.setattr(parity_questions, "NUM_TOKENS", NUM_TOKENS)
    monkeypatch.setattr(sglang_server, "FIRST_PAUSE_S", 0.05)


@dataclass(kw_only=True)
class Run:
    """A session whose episodes request one response after the other."""

    engine: SglangEngine
    renderer: Renderer
    warnings: list[str] = field(default_factory=list)
    num_asked: int = 0

    async def ask(self) -> GenerateResult:
        """A response in an episode of its own."""
        self.num_asked += 1
        return await self.engine.generate(self.request(f"e{self.num_asked}"))

    def request(self, episode_id: str = "") -> GenerateRequest:
        return text_request(self.renderer, episode_id=episode_id, temperature=1.0, max_new_tokens=2)

    async def ask_until(self, is_reached: Callable[[], bool], *, limit_s: float = 20.0) -> None:
        """Runs episodes, none of which fails, until the condition holds."""
        deadline = time.monotonic() + limit_s
        while not is_reached():
            assert time.monotonic() < deadline, f"not reached; warnings: {self.warnings}"
            await asyncio.gather(*(self.ask() for _ in range(2)))

    def num_episodes_of(self, server: SamplingServer) -> int:
        """The number of responses that this server was asked for by episodes."""
        prompt = list(self.request().token_ids)
        return sum(body["input_ids"] == prompt for body in server.requests("/generate"))


@asynccontextmanager
async def opened(place: Place, *servers: SamplingServer, **options: Any) -> AsyncIterator[Run]:
    warnings: list[str] = []
    options = {"folder": place.folder, **options}
    recipe = recipe_of(*servers, request_timeout_s=10.0, retry_budget_s=10.0)
    async with place.session(recipe, report=lambda message: warnings.append(message.message), **options) as session:
        assert isinstance(session.engine, SglangEngine)
        yield Run(engine=session.engine, renderer=Renderer(place.processor), warnings=warnings)


def away(server: SamplingServer) -> SamplingServer:
    """A server that takes no weights when the engine opens, and joins a moment later."""
    server.instead["/update_weights_from_disk"] = [Answer(status=500)]
    return server


async def test_a_server_that_drops_mrope_rows_is_refused_by_name_while_episodes_continue(place: Place) -> None:
    good, bad = place.serve(), away(place.serve("flat rows"))
    async with opened(place, good, bad) as run:
        await run.ask_until(lambda: bool(run.warnings))
        await asyncio.gather(*(run.ask() for _ in range(10)))
        assert run.num_episodes_of(bad) == 0
        assert run.num_episodes_of(good) == run.num_asked
    (warning,) = run.warnings
    assert f"{bad.url} fails the parity probe: it uses other image features or image positions." in warning
    assert f"differ from those of the sglang server at {good.url}, which has passed" in warning
    assert "compared again after 60 s" in warning


async def test_a_good_server_that_joins_is_compared_once_and_then_sampled_from(place: Place) -> None:
    good, late = place.serve(), away(place.serve())
    async with opened(place, good, late) as run:
        before = good.num_sampled
        await run.ask_until(lambda: run.num_episodes_of(late) > 5)
        assert not run.warnings
        assert late.num_sampled - run.num_episodes_of(late) == NUM_REQUESTS
        assert good.num_sampled - run.num_episodes_of(good) == before + NUM_REQUESTS
        prompts = [body["input_ids"] for body in late.requests("/generate") if "token_ids_logprob" not in body]
        first = prompts.index(list(run.request().token_ids))
    assert first == NUM_REQUESTS, "compared before its first response was used"
    assert good.num_scored == 2 * NUM_TOKENS * NUM_REQUESTS


async def test_a_server_that_joins_after_an_update_and_kept_its_old_weights_is_refused(
    place: Place, tmp_path: Path
) -> None:
    """The forward pass at the start used other weights, so the server is compared with one that has passed."""
    good, bad = place.serve(loads_really=True), place.serve()
    async with opened(place, good, bad) as run:
        bad.instead["/update_weights_from_disk"] = [Answer(status=500)]
        await run.engine.load_weights(make_other(place.folder, tmp_path), policy_version=1)
        bad.restart()
        await run.ask_until(lambda: bool(run.warnings))
        results = await asyncio.gather(*(run.ask() for _ in range(10)))
        assert {result.policy_version for result in results} == {1}
        assert run.num_episodes_of(bad) == 0
    assert f"{bad.url} fails the parity probe: it samples from other weights," in run.warnings[0]


async def test_the_only_server_is_compared_with_the_last_checkpoint_when_it_is_restarted(
    place: Place, tmp_path: Path
) -> None:
    server = place.serve(loads_really=True)
    async with opened(place, server) as run:
        await run.engine.load_weights(make_other(place.folder, tmp_path), policy_version=1)
        server.restart()
        before = server.num_sampled
        assert (await run.ask()).policy_version == 1
        assert server.num_sampled == before + NUM_REQUESTS + 2, "its first answer was of unknown weights"
        server.restart()
        server.engine.defect = "flat rows"
        with pytest.raises(
            EngineError, match=r"it drops the height and width rows of M-RoPE\. .* of the checkpoint by"
        ):
            await run.ask()
        with pytest.raises(EngineError, match="drops the height and width rows"):
            await run.ask()
    assert len(run.warnings) == 1


async def test_an_adapter_is_compared_under_its_name(place: Place, tmp_path: Path) -> None:
    adapter = make_adapter(place.folder, tmp_path / "adapter-run")
    good, late = place.serve(folder=adapter, lora=True), away(place.serve(folder=adapter, lora=True))
    async with opened(place, good, late, folder=adapter) as run:
        await run.ask_until(lambda: run.num_episodes_of(late) > 0)
        assert {body["lora_path"] for body in good.requests("/generate")[-5:]} == set(good.adapters)
        late.restart()
        late.engine.change_weights(place.serve().engine.model)
        late.adapters.clear()
        await run.ask_until(lambda: bool(run.warnings))
    assert f"{late.url} fails the parity probe: it samples from other weights," in run.warnings[0]
