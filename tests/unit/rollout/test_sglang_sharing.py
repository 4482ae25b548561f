"""Several engines on one server: one of them loads each set of weights once, and no other program replaces weights in
use."""

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
from osworld_pipeline.rollout.engines import sglang_admission, sglang_locks
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
    monkeypatch.setattr(sglang_locks, "POLL_S", 0.05)


async def open_engines(
    stack: AsyncExitStack, renderer: Renderer, fake: FakeSglang, count: int, **options: Any
) -> list[SglangEngine]:
    options = {"owner": "run", **options}
    return [await stack.enter_async_context(engine_of(renderer, fake, **options)) for _ in range(count)]


async def test_eight_engines_load_shared_weights_once(
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
    """A training and an evaluation, each with its own policy versions."""
    fake = start()
    async with AsyncExitStack() as stack:
        (training,) = await open_engines(stack, renderer, fake, 1)
        (evaluation,) = await open_engines(stack, renderer, fake, 1, owner="evaluation")
        await training.load_weights(checkpoints[FIRST], policy_version=7)
        await evaluation.load_weights(checkpoints[FIRST], policy_version=0)
        assert (await training.generate(text_request(renderer))).policy_version == 7
        assert (await evaluation.generate(text_request(renderer))).policy_version == 0
    assert fake.num_loads == 1


async def test_a_response_of_the_run_s_next_weights_waits_until_its_engine_receives_them(
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


async def test_an_engine_without_the_next_weights_does_not_restore_the_old_ones(
    renderer: Renderer, start: Start, checkpoints: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("osworld_pipeline.rollout.engines.sglang.LAG_LIMIT_S", 0.1)
    fake = start()
    async with AsyncExitStack() as stack:
        ahead, behind = await open_engines(stack, renderer, fake, 2, retry_budget_s=1.5)
        for engine in (ahead, behind):
            await engine.load_weights(checkpoints[FIRST], policy_version=1)
        await ahead.load_weights(checkpoints[SECOND], policy_version=2)
        with pytest.raises(
            EngineError, match=r"already serves .*checkpoint-2 .* still samples .*-1: it has not received"
        ):
            await behind.generate(text_request(renderer))
        assert (await ahead.generate(text_request(renderer))).policy_version == 2
    assert fake.num_loads == 2


async def test_weights_that_another_program_samples_are_not_replaced_and_both_are_named(
    renderer: Renderer, start: Start, checkpoints: dict[int, Path]
) -> None:
    fake = start()
    async with AsyncExitStack() as stack:
        (training,) = await open_engines(stack, renderer, fake, 1)
        (newcomer,) = await open_engines(stack, renderer, fake, 1, owner="evaluation", retry_budget_s=1.0)
        await training.load_weights(checkpoints[FIRST], policy_version=1)
        with pytest.raises(EngineError, match=r"serves .*-1 .* to another program, and this one needs .*-2 "):
            await newcomer.load_weights(checkpoints[SECOND], policy_version=0)
        assert (await training.generate(text_request(renderer))).policy_version == 1
        assert fake.num_loads == 1
        await training.close()
        await newcomer.load_weights(checkpoints[SECOND], policy_version=0)
    assert fake.num_loads == 2


async def test_weights_stay_leased_by_a_second_program_when_the_one_that_loaded_them_has_ended(
    renderer: Renderer, start: Start, checkpoints: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_locks, "RENEWAL_S", 0.1)
    fake = start()
    async with AsyncExitStack() as stack:
        (training,) = await open_engines(stack, renderer, fake, 1)
        (second,) = await open_engines(stack, renderer, fake, 1, owner="second")
        (newcomer,) = await open_engines(stack, renderer, fake, 1, owner="newcomer", retry_budget_s=0.5)
        await training.load_weights(checkpoints[FIRST], policy_version=1)
        await second.load_weights(checkpoints[FIRST], policy_version=0)
        await training.close()
        await asyncio.sleep(0.5)
        with pytest.raises(EngineError, match="to another program"):
            await newcomer.load_weights(checkpoints[SECOND], policy_version=0)
        await second.generate(text_request(renderer))
    assert fake.num_loads == 1


async def test_a_run_that_starts_on_the_weights_of_an_ended_run_replaces_them(
    renderer: Renderer, start: Start, checkpoints: dict[int, Path]
) -> None:
    """As the second phase of a training does: it samples its parent's weights first, then its own."""
    fake = start()
    async with AsyncExitStack() as stack:
        (first,) = await open_engines(stack, renderer, fake, 1, owner="phase 1")
        await first.load_weights(checkpoints[FIRST], policy_version=9)
        await first.close()
        second = await open_engines(stack, renderer, fake, 2, owner="phase 2", retry_budget_s=1.0)
        for version, path in enumerate(checkpoints.values()):
            await asyncio.gather(*(engine.load_weights(path, policy_version=version) for engine in second))
            results = await asyncio.gather(*(engine.generate(text_request(renderer)) for engine in second))
            assert {result.policy_version for result in results} == {version}
    assert fake.num_loads == 2


async def test_the_lease_of_a_killed_program_expires(
    renderer: Renderer, start: Start, checkpoints: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_locks, "LEASE_LIMIT_S", 0.5)
    owner = "deadbeef"
    fake = start(label=str(Label(weights="0" * 24, vision="1" * 24, owner=owner)))
    for turn in range(2):
        fake.sessions[f"osworld-use-{owner}-{turn}"] = time.monotonic() + 0.5
    async with AsyncExitStack() as stack:
        (engine,) = await open_engines(stack, renderer, fake, 1)
        await engine.load_weights(checkpoints[FIRST], policy_version=1)
    assert weights_digest(checkpoints[FIRST]) in fake.label


async def test_a_killed_loader_blocks_others_until_its_lock_expires_and_its_pause_is_ended(
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


async def test_a_server_left_paused_after_a_load_is_resumed_by_a_waiting_engine(
    renderer: Renderer, start: Start, checkpoints: dict[int, Path]
) -> None:
    fake = start()
    async with AsyncExitStack() as stack:
        (engine,) = await open_engines(stack, renderer, fake, 1, request_timeout_s=0.5)
        await engine.load_weights(checkpoints[FIRST], policy_version=1)
        fake.is_paused = True
        assert (await engine.generate(text_request(renderer))).policy_version == 1
    assert fake.num_loads == 1


async def test_a_server_that_keeps_losing_its_weights_is_reloaded_a_limited_number_of_times(
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


async def test_a_cancelled_loader_leaves_no_lock(
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


async def test_a_server_without_sessions_is_refused(
    renderer: Renderer, start: Start, checkpoints: dict[int, Path]
) -> None:
    fake = start(is_session_server=False)
    async with AsyncExitStack() as stack:
        (engine,) = await open_engines(stack, renderer, fake, 1)
        with pytest.raises(EngineError, match="open_session answered 404"):
            await engine.load_weights(checkpoints[FIRST], policy_version=1)
