"""Several engines on one server: it is given weights once, by one of them, and never by a stranger to those who use
it."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from fake_policy_server import FakeSglang
from sglang_samples import Start, engine_of, fake_servers, text_request, write_checkpoint

from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.errors import EngineError
from osworld_pipeline.protocols import GenerateResult
from osworld_pipeline.rollout.engines import sglang_admission, sglang_claims
from osworld_pipeline.rollout.engines.sglang import SglangEngine
from osworld_pipeline.rollout.engines.sglang_weights import Label, weights_digest

FIRST, SECOND = 1, 2


@pytest.fixture(scope="module")
def renderer(processor: Any) -> Renderer:
    return Renderer(processor)


@pytest.fixture
def checkpoints(tmp_path: Path) -> dict[int, Path]:
    return {words: write_checkpoint(tmp_path / f"checkpoint-{words}", words=words) for words in (FIRST, SECOND)}


@pytest.fixture
def start(renderer: Renderer, checkpoints: dict[int, Path]) -> Iterator[Start]:
    with fake_servers(renderer, model_path=str(checkpoints[FIRST])) as make:
        yield make


@pytest.fixture(autouse=True)
def pauses_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_claims, "PAUSE_S", 0.05)


async def open_engines(
    stack: AsyncExitStack, renderer: Renderer, fake: FakeSglang, count: int, **options: Any
) -> list[SglangEngine]:
    options = {"owner": "run", **options}
    return [await stack.enter_async_context(engine_of(renderer, fake, **options)) for _ in range(count)]


async def test_eight_engines_load_what_they_share_once(
    renderer: Renderer, start: Start, checkpoints: dict[int, Path]
) -> None:
    fake = start(load_s=0.2)
    async with AsyncExitStack() as stack:
        engines = await open_engines(stack, renderer, fake, 8)
        for version, path in checkpoints.items():
            await asyncio.gather(*(engine.load_weights(path, policy_version=version) for engine in engines))
            results = await asyncio.gather(*(engine.generate(text_request(renderer)) for engine in engines))
            assert {result.policy_version for result in results} == {version}
    assert fake.num_loads == 2
    assert fake.num_broken_loads == 0
    assert not fake.is_paused


async def test_engines_of_different_programs_share_the_same_weights(
    renderer: Renderer, start: Start, checkpoints: dict[int, Path]
) -> None:
    """Training, and an evaluation beside it, each with policy versions of its own."""
    fake = start()
    async with AsyncExitStack() as stack:
        (training,) = await open_engines(stack, renderer, fake, 1)
        (evaluation,) = await open_engines(stack, renderer, fake, 1, owner="evaluation")
        await training.load_weights(checkpoints[FIRST], policy_version=7)
        await evaluation.load_weights(checkpoints[FIRST], policy_version=0)
        assert (await training.generate(text_request(renderer))).policy_version == 7
        assert (await evaluation.generate(text_request(renderer))).policy_version == 0
    assert fake.num_loads == 1


async def test_a_response_of_weights_that_the_run_has_gone_on_to_waits_until_its_engine_is_told(
    renderer: Renderer, start: Start, checkpoints: dict[int, Path]
) -> None:
    fake = start()
    async with AsyncExitStack() as stack:
        ahead, behind = await open_engines(stack, renderer, fake, 2)
        for engine in (ahead, behind):
            await engine.load_weights(checkpoints[FIRST], policy_version=1)
        await behind.generate(text_request(renderer))
        await ahead.load_weights(checkpoints[SECOND], policy_version=2)
        before = fake.paths().count("/generate")
        asked = asyncio.create_task(behind.generate(text_request(renderer)))
        await asyncio.sleep(0.3)
        assert not asked.done()
        await behind.load_weights(checkpoints[SECOND], policy_version=2)
        assert (await asked).policy_version == 2
    assert fake.paths().count("/generate") == before + 1, "what was sampled is not sampled again"
    assert fake.num_loads == 2


async def test_an_engine_that_is_not_told_never_brings_old_weights_back(
    renderer: Renderer, start: Start, checkpoints: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("osworld_pipeline.rollout.engines.sglang.TOLD_WITHIN_S", 0.1)
    fake = start()
    async with AsyncExitStack() as stack:
        ahead, behind = await open_engines(stack, renderer, fake, 2, retry_budget_s=1.5)
        for engine in (ahead, behind):
            await engine.load_weights(checkpoints[FIRST], policy_version=1)
        await ahead.load_weights(checkpoints[SECOND], policy_version=2)
        with pytest.raises(EngineError, match=r"gone on to .*checkpoint-2 .*not been told yet: it samples .*-1"):
            await behind.generate(text_request(renderer))
        assert (await ahead.generate(text_request(renderer))).policy_version == 2
    assert fake.num_loads == 2


async def test_weights_that_another_program_samples_are_not_replaced_and_both_are_named(
    renderer: Renderer, start: Start, checkpoints: dict[int, Path]
) -> None:
    fake = start()
    async with AsyncExitStack() as stack:
        (training,) = await open_engines(stack, renderer, fake, 1)
        (stranger,) = await open_engines(stack, renderer, fake, 1, owner="evaluation", retry_budget_s=1.0)
        await training.load_weights(checkpoints[FIRST], policy_version=1)
        with pytest.raises(EngineError, match=r"serves .*-1 .* to another program, and this one needs .*-2 "):
            await stranger.load_weights(checkpoints[SECOND], policy_version=0)
        assert (await training.generate(text_request(renderer))).policy_version == 1
        assert fake.num_loads == 1
        await training.close()
        await stranger.load_weights(checkpoints[SECOND], policy_version=0)
    assert fake.num_loads == 2


async def test_a_guest_keeps_weights_when_the_program_that_loaded_them_has_ended(
    renderer: Renderer, start: Start, checkpoints: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_claims, "RENEWAL_S", 0.1)
    fake = start()
    async with AsyncExitStack() as stack:
        (training,) = await open_engines(stack, renderer, fake, 1)
        (guest,) = await open_engines(stack, renderer, fake, 1, owner="guest")
        (stranger,) = await open_engines(stack, renderer, fake, 1, owner="stranger", retry_budget_s=0.5)
        await training.load_weights(checkpoints[FIRST], policy_version=1)
        await guest.load_weights(checkpoints[FIRST], policy_version=0)
        await training.close()
        await asyncio.sleep(0.5)
        with pytest.raises(EngineError, match="to another program"):
            await stranger.load_weights(checkpoints[SECOND], policy_version=0)
        await guest.generate(text_request(renderer))
    assert fake.num_loads == 1


async def test_the_use_of_a_program_that_was_killed_ends(
    renderer: Renderer, start: Start, checkpoints: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_claims, "USE_LIMIT_S", 0.5)
    owner = "deadbeef"
    fake = start(label=str(Label(weights="0" * 24, vision="1" * 24, owner=owner)))
    for turn in range(2):
        fake.sessions[f"osworld-use-{owner}-{turn}"] = time.monotonic() + 0.5
    async with AsyncExitStack() as stack:
        (engine,) = await open_engines(stack, renderer, fake, 1)
        await engine.load_weights(checkpoints[FIRST], policy_version=1)
    assert weights_digest(checkpoints[FIRST]) in fake.label


async def test_a_loader_that_was_killed_blocks_others_no_longer_than_its_claim_and_its_pause_is_ended(
    renderer: Renderer, start: Start, checkpoints: dict[int, Path]
) -> None:
    fake = start()
    fake.is_paused = True
    fake.sessions["osworld-loading"] = time.monotonic() + 1.0
    async with AsyncExitStack() as stack:
        engines = await open_engines(stack, renderer, fake, 3, request_timeout_s=0.5)
        began = time.monotonic()
        await asyncio.gather(*(engine.load_weights(checkpoints[FIRST], policy_version=1) for engine in engines))
        assert 0.9 < time.monotonic() - began < 8
        await asyncio.gather(*(engine.generate(text_request(renderer)) for engine in engines))
    assert fake.num_loads == 1


async def test_a_server_left_paused_after_its_load_is_continued_by_who_waits_for_it(
    renderer: Renderer, start: Start, checkpoints: dict[int, Path]
) -> None:
    fake = start()
    async with AsyncExitStack() as stack:
        (engine,) = await open_engines(stack, renderer, fake, 1, request_timeout_s=0.5)
        await engine.load_weights(checkpoints[FIRST], policy_version=1)
        fake.is_paused = True
        assert (await engine.generate(text_request(renderer))).policy_version == 1
    assert fake.num_loads == 1


async def test_a_server_that_goes_on_losing_its_weights_is_given_them_so_many_times_and_no_more(
    renderer: Renderer, start: Start, checkpoints: dict[int, Path]
) -> None:
    fake = start()
    async with AsyncExitStack() as stack:
        (engine,) = await open_engines(stack, renderer, fake, 1)
        await engine.load_weights(checkpoints[FIRST], policy_version=1)

        async def lose_and_ask() -> GenerateResult:
            fake.label = "default"
            engine._servers[0].held = None
            return await engine.generate(text_request(renderer))

        for _ in range(sglang_admission.MAX_RELOADS):
            await lose_and_ask()
        for _ in range(3):
            with pytest.raises(EngineError, match="lost its weights 5 times within 600 s"):
                await lose_and_ask()
    assert fake.num_loads == 1 + sglang_admission.MAX_RELOADS


async def test_a_waiting_loader_that_is_cancelled_leaves_no_claim(
    renderer: Renderer, start: Start, checkpoints: dict[int, Path]
) -> None:
    fake = start()
    fake.sessions["osworld-loading"] = time.monotonic() + 30
    async with AsyncExitStack() as stack:
        (engine,) = await open_engines(stack, renderer, fake, 1)
        task = asyncio.create_task(engine.load_weights(checkpoints[FIRST], policy_version=1))
        await asyncio.to_thread(fake.wait_for, "/open_session")
        del fake.sessions["osworld-loading"]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.2)
    assert "osworld-loading" not in fake.sessions


async def test_a_server_without_sessions_is_told_apart(
    renderer: Renderer, start: Start, checkpoints: dict[int, Path]
) -> None:
    fake = start(is_session_server=False)
    async with AsyncExitStack() as stack:
        (engine,) = await open_engines(stack, renderer, fake, 1)
        with pytest.raises(EngineError, match="open_session answered 404"):
            await engine.load_weights(checkpoints[FIRST], policy_version=1)
