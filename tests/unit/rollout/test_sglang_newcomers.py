"""Servers that join are compared before they are sampled from: with what, how often, and which requests wait."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fake_policy_server import Answer, FakeSglang
from sglang_samples import REPLY, Start, engine_of, fake_servers, text_request, write_checkpoint

from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.errors import EngineError
from osworld_pipeline.protocols import GenerateResult
from osworld_pipeline.rollout.engines import sglang_locks, sglang_newcomers, sglang_server
from osworld_pipeline.rollout.engines.http_calls import TransientError
from osworld_pipeline.rollout.engines.sglang import SglangEngine
from osworld_pipeline.rollout.engines.sglang_newcomers import Peer


@dataclass(kw_only=True)
class Comparisons:
    """Replaces the probe: sends one request to each server, and refuses the servers in `refused`."""

    renderer: Renderer
    refused: set[str] = field(default_factory=set)
    """Their addresses."""
    made: list[tuple[str, str]] = field(default_factory=list)
    """Of which server, with what."""
    warnings: list[str] = field(default_factory=list)
    duration_s: float = 0.0
    scores: tuple[float, ...] = ()

    async def __call__(self, newcomer: Peer, reference: Peer | Path) -> None:
        self.made.append((newcomer.name, reference.name))
        await asyncio.sleep(self.duration_s)
        request = text_request(self.renderer)
        result = await newcomer.generate(request)
        if isinstance(reference, Peer):
            peer: Peer = reference
            self.scores = await peer.score(request, result.token_ids)
        if any(newcomer.name.endswith(url) for url in self.refused):
            raise EngineError(f"{newcomer.name} differs")


@dataclass(kw_only=True)
class Run:
    engine: SglangEngine
    compare: Comparisons

    async def ask(self, **options: Any) -> GenerateResult:
        return await self.engine.generate(text_request(self.compare.renderer, **options))

    async def ask_until(self, is_reached: Callable[[], bool], *, limit_s: float = 10.0) -> None:
        """Sends requests until the condition holds; none of them may fail."""
        deadline = time.monotonic() + limit_s
        while not is_reached():
            assert time.monotonic() < deadline, f"not reached: {self.compare}"
            await asyncio.gather(*(self.ask() for _ in range(3)))

    def sampled(self, fake: FakeSglang) -> Callable[[], bool]:
        """A check whether the server has sampled since this call."""
        before = num_sampled(fake)
        return lambda: num_sampled(fake) > before


def num_sampled(fake: FakeSglang) -> int:
    return sum("token_ids_logprob" not in body for body in fake.requests("/generate"))


@pytest.fixture(scope="module")
def renderer(processor: Any) -> Renderer:
    return Renderer(processor)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint")


@pytest.fixture
def start(renderer: Renderer, checkpoint: Path) -> Iterator[Start]:
    with fake_servers(renderer, model_path=str(checkpoint)) as make:
        yield make


@pytest.fixture(autouse=True)
def pauses_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_server, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(sglang_newcomers, "FIRST_RETRY_S", 0.05)
    monkeypatch.setattr(sglang_locks, "POLL_S", 0.02)


@pytest.fixture
def opened(renderer: Renderer, checkpoint: Path) -> Any:
    """Opens an engine with the checkpoint that compares each server that joins; all that hold it have passed."""

    @asynccontextmanager
    async def opened(*fakes: FakeSglang, all_passed: bool = True, **options: Any) -> AsyncIterator[Run]:
        compare = Comparisons(renderer=renderer)
        async with engine_of(renderer, *fakes, **{"owner": "run", **options}) as engine:
            await engine.load_weights(checkpoint, policy_version=1)
            passed = tuple(engine.by_server()) if all_passed else ()
            await engine.compare_newcomers(compare, passed=passed, warn=compare.warnings.append)
            yield Run(engine=engine, compare=compare)

    return opened


def away(fake: FakeSglang) -> FakeSglang:
    """Makes the server refuse weights when the engine opens, so that it joins a moment later."""
    fake.instead["/update_weights_from_disk"] = [Answer(status=500)]
    return fake


def restart(fake: FakeSglang) -> None:
    fake.label, fake.sessions = "default", {}


async def test_servers_that_have_passed_are_not_compared(start: Start, opened: Any) -> None:
    one, other = start(), start()
    async with opened(one, other) as run:
        await run.ask_until(run.sampled(one))
        await run.ask_until(run.sampled(other))
    assert run.compare.made == []


async def test_a_server_that_joins_is_compared_once_with_one_that_has_passed(start: Start, opened: Any) -> None:
    good, late = start(), away(start())
    async with opened(good, late) as run:
        await run.ask_until(lambda: num_sampled(late) > 3)
    assert run.compare.made == [(f"the sglang server at {late.url}", f"the sglang server at {good.url}")]
    assert not run.compare.warnings


async def test_given_tokens_are_scored_one_by_one_under_the_request_s_own_distribution(
    start: Start, opened: Any
) -> None:
    good, late = start(), away(start())
    async with opened(good, late) as run:
        await run.ask_until(lambda: num_sampled(late) > 1)
        prompt = text_request(run.compare.renderer)
    bodies = [body for body in good.requests("/generate") if len(body.get("token_ids_logprob", ())) == 1]
    assert [body["input_ids"] for body in bodies] == [[*prompt.token_ids, *REPLY[:index]] for index in range(3)]
    assert [body["token_ids_logprob"] for body in bodies] == [[token_id] for token_id in REPLY]
    assert {body["sampling_params"]["temperature"] for body in bodies} == {0.7}
    assert {body["sampling_params"]["max_new_tokens"] for body in bodies} == {1}
    assert all(body["sampling_params"]["logit_bias"] for body in bodies)
    assert run.compare.scores == tuple((-1.0 - (token_id % 7) / 4 - 1) / 0.7 for token_id in REPLY)


async def test_no_episode_waits_for_a_comparison_while_another_server_is_healthy(start: Start, opened: Any) -> None:
    good, late = start(), away(start())
    async with opened(good, late) as run:
        run.compare.duration_s = 6.0
        await run.ask_until(lambda: bool(run.compare.made))
        began = time.monotonic()
        for _ in range(10):
            await asyncio.gather(*(run.ask() for _ in range(3)))
        assert time.monotonic() - began < 6.0
        assert num_sampled(late) == 0


async def test_a_refused_server_is_compared_again_only_after_pauses_that_grow(
    start: Start, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_newcomers, "FIRST_REFUSAL_S", 0.1)
    good, bad = start(), away(start())
    async with opened(good, bad) as run:
        run.compare.refused.add(bad.url)
        await run.ask_until(lambda: len(run.compare.warnings) == 3)
        monkeypatch.setattr(sglang_newcomers, "FIRST_REFUSAL_S", 60.0)
        await run.ask_until(lambda: len(run.compare.warnings) == 4)
        calls = len(bad.calls)
        for _ in range(20):
            await run.ask()
        assert len(bad.calls) == calls, "it is not asked again"
        assert num_sampled(bad) == len(run.compare.made) == 4
    assert all(f"{bad.url} differs; it is not sampled from" in warning for warning in run.compare.warnings)
    pauses = [warning.rpartition(" after ")[2] for warning in run.compare.warnings]
    assert pauses == ["0.1 s", "0.2 s", "0.4 s", "480 s"]


async def test_a_refused_server_that_was_repaired_is_admitted_after_its_pause(
    start: Start, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_newcomers, "FIRST_REFUSAL_S", 0.2)
    good, bad = start(), away(start())
    async with opened(good, bad) as run:
        run.compare.refused.add(bad.url)
        await run.ask_until(lambda: bool(run.compare.warnings))
        run.compare.refused.clear()
        await run.ask_until(lambda: num_sampled(bad) > 4)
    assert len(run.compare.warnings) == 1


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_lost_connection_costs_no_comparison_and_a_new_process_does(
    restarts: bool, start: Start, opened: Any
) -> None:
    good, other = start(), start()
    async with opened(good, other) as run:
        await run.ask_until(run.sampled(other))
        if restarts:
            restart(other)
        other.instead["/generate"] = [Answer(is_dropped=True)]
        await run.ask_until(lambda: not other.instead["/generate"])
        await run.ask_until(run.sampled(other))
        await run.ask_until(run.sampled(other))
    assert len(run.compare.made) == restarts


async def test_a_server_whose_process_changed_between_two_responses_is_compared(start: Start, opened: Any) -> None:
    """No request fails: responses of the new process name weights that it was not given."""
    good, other = start(), start()
    async with opened(good, other) as run:
        restart(other)
        await run.ask_until(lambda: bool(run.compare.made))
        results = [await run.ask() for _ in range(6)]
    assert {result.policy_version for result in results} == {1}
    assert [name for name, _ in run.compare.made] == [f"the sglang server at {other.url}"]


async def test_the_only_server_is_compared_with_the_checkpoint_loaded_last_and_refused_at_once(
    start: Start, opened: Any, tmp_path: Path
) -> None:
    server = start()
    second = write_checkpoint(tmp_path / "second", words=2)
    async with opened(server) as run:
        await run.engine.load_weights(second, policy_version=2)
        restart(server)
        assert (await run.ask()).policy_version == 2
        assert run.compare.made == [(f"the sglang server at {server.url}", "second")]
        restart(server)
        run.compare.refused.add(server.url)
        for _ in range(3):
            with pytest.raises(EngineError, match="differs; it is not sampled from, and is compared again after 60 s"):
                await run.ask()
        assert len(run.compare.made) == 2


async def test_one_of_several_servers_is_compared_with_the_checkpoint_only_if_no_other_server_has_passed(
    start: Start, opened: Any
) -> None:
    one, other = start(), start()
    async with opened(one, other) as run:
        for fake in (one, other):
            restart(fake)

        # A server whose restart is not noticed yet may be named first: its responses are of unknown weights.
        def references() -> list[str]:
            return [reference for _, reference in run.compare.made]

        await run.ask_until(lambda: "checkpoint" in references() and references()[-1] != "checkpoint")
    assert references().count("checkpoint") == 1


async def test_a_server_is_not_refused_where_the_comparison_itself_fails(start: Start, opened: Any) -> None:
    good, late = start(), away(start())
    async with opened(good, late) as run:
        real, failures = (
            run.compare.__call__,
            [TransientError("no answer"), ValueError("a defect"), TransientError("no")],
        )

        async def failing(newcomer: Peer, reference: Peer | Path) -> None:
            if failures:
                raise failures.pop(0)
            await real(newcomer, reference)

        assert run.engine._newcomers is not None
        run.engine._newcomers._compare = failing
        await run.ask_until(run.sampled(late))
    assert not failures
    assert [warning.partition(";")[0].rpartition("compared: ")[2] for warning in run.compare.warnings] == [
        "ValueError: a defect",
        "no",
    ]


async def test_a_comparison_that_takes_too_long_ends(
    start: Start, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_newcomers, "PEER_LIMIT_S", 1.0)
    good, late = start(), away(start())
    async with opened(good, late) as run:
        run.compare.duration_s = 30.0
        await run.ask_until(lambda: bool(run.compare.warnings))
        assert "did not end within 1 s" in run.compare.warnings[0]
        assert num_sampled(late) == 0


async def test_weights_that_change_during_a_comparison_make_it_void(start: Start, opened: Any, tmp_path: Path) -> None:
    good, late = start(), away(start())
    second = write_checkpoint(tmp_path / "second", words=2)
    async with opened(good, late) as run:
        run.compare.duration_s = 0.5
        await run.ask_until(lambda: bool(run.compare.made))
        await run.engine.load_weights(second, policy_version=2)
        run.compare.duration_s = 0.0
        await run.ask_until(lambda: len(run.compare.made) == 2)
        await run.ask_until(run.sampled(late))
    assert not run.compare.warnings
    assert len(run.compare.made) == 2


async def test_engines_of_one_run_compare_a_server_once_and_refuse_it_once(start: Start, opened: Any) -> None:
    """As with rollout actors: the program that starts them has already probed their servers."""
    probed, late, bad = start(), start(), start()
    async with opened(probed):
        pass
    servers = (probed, late, bad)
    async with opened(*servers, all_passed=False) as one, opened(*servers, all_passed=False) as other:
        for run in (one, other):
            run.compare.refused.add(bad.url)
            await run.ask_until(run.sampled(probed))
        for run in (one, other):
            await run.ask_until(run.sampled(late))
            await run.ask_until(
                lambda run=run: any("refused" in text or "differs" in text for text in run.compare.warnings)
            )
    made = [name.rpartition(" ")[2] for run in (one, other) for name, _ in run.compare.made]
    assert sorted(made) == sorted([late.url, bad.url])
    assert num_sampled(bad) == 1


async def test_an_engine_that_is_closed_leaves_no_comparison_and_no_lock(start: Start, opened: Any) -> None:
    good, late = start(), away(start())
    async with opened(good, late) as run:
        run.compare.duration_s = 30.0
        await run.ask_until(lambda: bool(run.compare.made))
    assert not [name for name in late.sessions if "parity-lock" in name]
