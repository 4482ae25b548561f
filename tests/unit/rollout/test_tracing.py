"""Traces of episodes: off by default, one trace for each episode, and no trace disturbs what it observes."""

import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import duckdb
import httpx
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as quick
from hypothesis import strategies as st
from trace_collector import Collector, collecting_traces, tracing_to

from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.domain.episode import Episode, Outcome
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import DependencyError, ReplicaError
from osworld_pipeline.rollout.engines.http_calls import JsonClient
from osworld_pipeline.rollout.run_episode import EpisodePlan, EpisodeSettings, EpisodeTools, run_episode
from osworld_pipeline.wire import tracing
from osworld_pipeline.wire.tracing import add_past_span, add_to_episodes, episode_span, ids_of, served_span

Tools = Callable[..., EpisodeTools]
Play = Callable[[list[Any], list[str]], Awaitable[Episode]]
DIALECT = load_dialect("slime")
TYPE = DIALECT.format("Type the command", {"action": "type", "text": "mv alpha bravo\n"})
DONE = DIALECT.format("Finish", {"action": "terminate", "status": "success"})
UNUSED_URL = "http://127.0.0.1:9"


@pytest.fixture
def collector() -> Iterator[Collector]:
    """The collector that this process sends its traces to."""
    with collecting_traces() as collector, tracing_to(collector.url):
        yield collector


@pytest.fixture
def play(task: Task, plan: EpisodePlan, settings: EpisodeSettings, make_tools: Tools) -> Play:
    """Runs the episode `e1` on these desktops with these answers."""
    return lambda desktops, answers: run_episode(task, plan, tools=make_tools(desktops, answers), settings=settings)


async def test_an_episode_is_one_trace_whose_id_follows_from_the_id_of_the_episode(
    collector: Collector, play: Play, fake_desktop: Any
) -> None:
    assert (await play([fake_desktop()], [TYPE, DONE])).outcome is Outcome.SUCCESS
    tracing.flush()
    turn = ["episode/attempt/turn/generate", "episode/attempt/turn/step", "episode/attempt/turn"]
    rest = ["episode/attempt/evaluate", "episode/attempt/close", "episode/attempt", "episode"]
    assert collector.tree("e1") == ["episode/attempt/reset", *turn, *turn, *rest]
    root = collector.spans[-1]
    assert (root.trace_id, root.span_id) == ids_of("e1")
    assert root.attributes == {
        "osworld.episode_id": "e1",
        "osworld.task_id": "t1",
        "osworld.checkpoint_id": "c1",
        "osworld.group_id": "g1",
        "osworld.purpose": "train",
        "osworld.outcome": "success",
        "osworld.reward": 1.0,
        "osworld.num_steps": 2,
    }


async def test_an_attempt_that_failed_is_in_the_trace_with_its_error(
    collector: Collector, play: Play, fake_desktop: Any
) -> None:
    await play([fake_desktop(faults={"act": ReplicaError("the desktop died")}), fake_desktop()], [TYPE, TYPE, DONE])
    tracing.flush()
    attempts = [one.attributes["number"] for one in collector.spans if one.name == "attempt"]
    assert attempts == [0, 1]
    assert [one.error for one in collector.spans if one.name == "turn"] == ["ReplicaError: the desktop died", "", ""]


def test_a_query_finds_the_trace_of_an_episode() -> None:
    """The expression is that of docs/scaling.md."""
    ((found,),) = duckdb.sql("SELECT left(sha256('e1'), 32)").fetchall()
    assert found == f"{ids_of('e1')[0]:032x}"


def test_a_span_of_a_later_process_joins_the_episodes_trace(collector: Collector) -> None:
    with episode_span("e1", {}):
        pass
    started_at = time.time() - 2
    add_to_episodes("train", ["e1", "e2"], started_at=started_at, attributes={"osworld.update": 3})
    tracing.flush()
    assert collector.tree("e1") == ["episode", "episode/train"]
    assert collector.tree("e2") == ["?/train"], "its rollout was traced by no one"
    assert [one.attributes for one in collector.spans if one.name == "train"] == [{"osworld.update": 3}] * 2
    assert 2 <= collector.spans[-1].seconds < 3


def test_a_sampler_of_a_share_selects_the_same_episodes_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.3")
    names = [f"e{number}" for number in range(100)]
    with collecting_traces() as collector, tracing_to(collector.url):
        for name in names:
            with episode_span(name, {}):
                pass
        add_to_episodes("train", names, started_at=time.time(), attributes={})
        tracing.flush()
    trees = [collector.tree(name) for name in names]
    assert 10 < trees.count(["episode", "episode/train"]) < 50
    assert trees.count(["episode", "episode/train"]) + trees.count([]) == 100


async def test_calls_of_an_episode_carry_its_context_and_other_calls_none(collector: Collector) -> None:
    sent: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request.headers.get("traceparent"))
        return httpx.Response(200, json={})

    client = JsonClient(transport=httpx.MockTransport(answer))
    await client.post("http://s/generate", b"{}", timeout_s=5)
    with episode_span("e1", {}):
        await client.post("http://s/generate", b"{}", timeout_s=5)
        with served_span("POST", {b"traceparent": b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01"}) as served:
            assert served.get_span_context().trace_id == int("a" * 32, 16)
            add_past_span("queue", 0.5)
    await client.close()
    trace_id, span_id = ids_of("e1")
    assert [header and header[:-3] for header in sent] == [None, f"00-{trace_id:032x}-{span_id:016x}"]
    tracing.flush()
    assert [(one.name, round(one.seconds, 1)) for one in collector.spans if one.trace_id == int("a" * 32, 16)] == [
        ("queue", 0.5),
        ("POST", 0.0),
    ]


@quick(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=st.binary(max_size=80) | st.from_regex(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}"))
def test_any_header_of_a_client_gives_a_valid_context_or_none(collector: Collector, header: bytes) -> None:
    with served_span("GET", {b"traceparent": header, b"tracestate": header}) as served:
        assert served is None or served.get_span_context().is_valid


SCRIPT = """
import sys, time
from osworld_pipeline.wire.tracing import episode_span, flush, span, start_tracing
start_tracing("test")
started = time.monotonic()
for number in range(20):
    with episode_span(f"e{number}", {}), span("attempt"):
        pass
assert time.monotonic() - started < 1.0, "an episode does not wait for the collector"
flush()
print("opentelemetry.sdk" in sys.modules)
"""


@pytest.mark.parametrize("endpoint", ["", UNUSED_URL])
def test_a_program_runs_to_its_end_without_a_collector(endpoint: str) -> None:
    started = time.monotonic()
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={"PATH": "", "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (run.returncode, run.stdout) == (0, f"{bool(endpoint)}\n"), run.stderr
    assert time.monotonic() - started < 20


async def test_our_library_needs_no_packages_in_a_users_program_that_sends_its_own_traces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", UNUSED_URL)
    for name in ("opentelemetry", "opentelemetry.trace", "opentelemetry.propagate"):
        monkeypatch.setitem(sys.modules, name, None)
    with episode_span("e1", {}):
        await tracing.send_context(httpx.Request("GET", "http://s"))


def test_missing_packages_are_named_with_the_command_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    tracing.start_tracing("test")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", UNUSED_URL)
    with pytest.raises(DependencyError, match=r"asks for traces, but opentelemetry\S* is not installed: .*python"):
        tracing.start_tracing("test")
