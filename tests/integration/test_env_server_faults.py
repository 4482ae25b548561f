"""The env server under load while the processes it depends on are killed: every episode ends in exactly one outcome, no
fault is a reward, capacity comes back, and nothing is left. OSWORLD_FAULT_EPISODES and OSWORLD_FAULT_SEED change the
load."""

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress

import httpx
import pytest
from env_server_process import RunningServer, running_env_server
from fault_load import TASK, Raw, Tally, run_load, wait_until_free
from server_traces import traces_of, wait_for_the_same

from osworld_pipeline.rollout.env_client import EnvClient
from osworld_pipeline.wire import EnvConfig

pytestmark = [pytest.mark.desktop, pytest.mark.slow]

NUM_REPLICAS, CONCURRENCY = 4, 8
NUM_EPISODES = int(os.environ.get("OSWORLD_FAULT_EPISODES", "50"))
CAPACITY_LIMIT_S = 5.0
IDLE_TTL_S = 2.5
TIME_LIMIT_S = 60 + 3 * NUM_EPISODES


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("faults")
    (folder / "server.toml").write_text(f"idle_ttl_s = {IDLE_TTL_S}\nqueue_timeout_s = 60\nslow_client_s = 3\n")
    options = ("--screen-size", "640x480", "--config", str(folder / "server.toml"))
    with running_env_server(folder, *options, num_replicas=NUM_REPLICAS) as running:
        yield running


def read_metrics(url: str) -> dict[str, float]:
    """Every sample by its full name with labels."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}


def ended_by_outcome(metrics: dict[str, float]) -> dict[str, int]:
    prefix = 'env_server_episodes_ended_total{outcome="'
    return {name[len(prefix) : -2]: int(value) for name, value in metrics.items() if name.startswith(prefix)}


@pytest.mark.timeout(TIME_LIMIT_S + 60)
async def test_every_episode_has_one_outcome_while_everything_is_killed(server: RunningServer) -> None:
    seed = int(os.environ.get("OSWORLD_FAULT_SEED", random.randrange(10**6)))
    print(f"seed {seed}, {NUM_EPISODES} episodes")
    before = traces_of(server)
    async with asyncio.timeout(TIME_LIMIT_S):
        tally = await run_load(
            server.url, server.process.pid, num_episodes=NUM_EPISODES, concurrency=CONCURRENCY, seed=seed
        )
    capacity_s = await wait_until_free(server.url, NUM_REPLICAS, CAPACITY_LIMIT_S)
    metrics = read_metrics(server.url)
    ended = ended_by_outcome(metrics)
    reported = f"seed {seed}: clients saw {dict(tally.seen)}, killed {dict(tally.num_kills)}, server ended {ended}"
    print(f"{reported}; capacity back after {capacity_s:.2f} s")

    assert tally.wrong == [], reported
    assert tally.seen.total() == NUM_EPISODES, reported
    check_agreement(tally, ended, int(metrics["env_server_episodes_opened_total"]), reported)
    assert metrics["env_server_episodes_live"] == 0
    wait_for_the_same(before, server, limit_s=10.0)


def check_agreement(tally: Tally, ended: dict[str, int], opened: int, reported: str) -> None:
    """The server's outcomes agree with its clients'. If a client is gone, only the server has the episode's outcome."""
    seen = tally.seen
    assert sum(ended.values()) == opened, reported
    assert ended["evaluated"] == seen["scored"], reported
    assert ended["closed"] <= seen["closed"], reported
    assert ended["shutdown"] == 0, reported
    faults = ended["env_fault"] + ended["grader_fault"] + ended["tampering"]
    assert faults + ended["idle"] >= seen["fault"], reported
    known = seen["scored"] + seen["closed"] + seen["fault"]
    assert known <= opened <= known + tally.num_hung_up_resets, reported
    # Otherwise the load would have proved nothing.
    assert seen["scored"] > 0, reported
    assert faults > 0, reported
    assert tally.num_kills.total() >= NUM_EPISODES // 10, reported


@asynccontextmanager
async def connected(raw: Raw) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(raw.host, raw.port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        with suppress(OSError):
            await writer.wait_closed()


async def read_answer(reader: asyncio.StreamReader, limit_s: float) -> bytes:
    """All bytes until the server closes the connection; empty if the server does not close it."""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(limit_s):
            return await reader.read()
    return b""


async def send_a_head_slowly(raw: Raw, over: asyncio.Event) -> bytes:
    """Sends the head of a request one letter at a time."""
    async with connected(raw) as (reader, writer):
        writer.write(b"POST /step HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
        answering = asyncio.create_task(read_answer(reader, 20.0))
        with suppress(OSError):
            while not answering.done():
                writer.write(b"a")
                await writer.drain()
                await asyncio.wait({answering}, timeout=0.3)
        return await answering


async def send_a_body_slowly(raw: Raw, over: asyncio.Event) -> bytes:
    async with connected(raw) as (reader, writer):
        writer.write(HEAD + b'Content-Length: 100\r\n\r\n{"episode_id"')
        return await read_answer(reader, 20.0)


async def send_100_mb_in_chunks(raw: Raw, over: asyncio.Event) -> bytes:
    block = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
    async with connected(raw) as (reader, writer):
        writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        answering = asyncio.create_task(read_answer(reader, 20.0))
        num_sent = 0
        with suppress(OSError):
            while num_sent < 100 and not answering.done():
                writer.write(block)
                await writer.drain()
                num_sent += 1
        assert num_sent < 50, "the server took them all"
        # Closing a connection with unread data resets it, which may cost the client the answer.
        return await answering or b"HTTP/1.1 413 lost"


async def announce_100_mb(raw: Raw, over: asyncio.Event) -> bytes:
    async with connected(raw) as (reader, writer):
        writer.write(HEAD + b"Content-Length: 100000000\r\n\r\n" + b" " * 1000)
        return await read_answer(reader, 20.0)


async def send_nonsense(raw: Raw, over: asyncio.Event) -> bytes:
    """Sends invalid requests until `over` is set, and returns the last answer."""
    answer = b""
    while not over.is_set():
        for body in (b'{"episode_id": ', b"\xff\xfe", b"[]", UNKNOWN, b"{" * 5000):
            async with connected(raw) as (reader, writer):
                writer.write(HEAD + f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
                answer = await read_answer(reader, 20.0)
            assert answer.startswith(b"HTTP/1.1 4"), answer
            assert b'"error"' in answer, answer
        await asyncio.sleep(0.05)
    return answer


HEAD = b"POST /step HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
UNKNOWN = b'{"episode_id": "nobody", "action": "DONE"}'
HOSTILE: tuple[tuple[Callable[[Raw, asyncio.Event], Coroutine[None, None, bytes]], bytes], ...] = (
    (send_a_head_slowly, b" 408 "),
    (send_a_head_slowly, b" 408 "),
    (send_a_body_slowly, b" 408 "),
    (send_a_body_slowly, b" 408 "),
    (send_100_mb_in_chunks, b" 413 "),
    (announce_100_mb, b" 413 "),
    (send_nonsense, b" 4"),
    (send_nonsense, b" 4"),
)
"""Each with the status that it is to be answered with."""


@pytest.mark.timeout(120)
async def test_hostile_clients_do_not_harm_episodes_in_progress(server: RunningServer) -> None:
    before = traces_of(server)
    raw, over = Raw(server.url, Tally()), asyncio.Event()
    step_s: list[float] = []

    async def work(client: EnvClient) -> float:
        desktop = client.desktop()
        try:
            await desktop.reset(TASK)
            for _ in range(12):
                start = time.monotonic()
                await desktop.act("pyautogui.moveTo(90, 90)", pause_s=0.2)
                step_s.append(time.monotonic() - start - 0.2)
            return await desktop.score()
        finally:
            await desktop.close()

    async with EnvClient(server.url, env_config=EnvConfig(require_a11y_tree=False)) as client:
        enemies = [asyncio.create_task(attack(raw, over)) for attack, _ in HOSTILE]
        rewards = await asyncio.gather(*(work(client) for _ in range(NUM_REPLICAS)))
        over.set()
        answers = await asyncio.gather(*enemies)
    assert rewards == [1.0] * NUM_REPLICAS
    assert sorted(step_s)[len(step_s) * 9 // 10] < 1.0, step_s
    for (attack, status), answer in zip(HOSTILE, answers, strict=True):
        assert status in answer[:16], (attack.__name__, answer)
    await wait_until_free(server.url, NUM_REPLICAS, CAPACITY_LIMIT_S)
    wait_for_the_same(before, server, limit_s=15.0)
