"""A load of concurrent episodes over raw keep-alive connections, in a separate process and cheap enough (a tenth of
a millisecond a step) to measure the server. Prints one JSON object."""

import argparse
import asyncio
import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import urlsplit

from benchmarks.processes import cpu_s
from benchmarks.stub_step import STEP_S, TASK

REQUEST_TIMEOUT_S = 60.0
NUM_OPENING = 4
"""Episodes opened at once: a server with a listen queue of five would lose more."""


class Connection(asyncio.Protocol):
    """One request at a time; reopened if the server closes it after each answer."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[bytes] | None = None
        self._chunks: list[bytes] = []
        self._num_missing = -1
        self._is_last = False

    async def post(self, path: str, body: bytes, *, accept: str = "application/json") -> bytes:
        """The body of a 200; ConnectionError for anything else."""
        if self._transport is None:
            loop = asyncio.get_running_loop()
            await asyncio.wait_for(loop.create_connection(lambda: self, self._host, self._port), REQUEST_TIMEOUT_S)
        assert self._transport is not None, "connection_made comes before create_connection returns"
        head = f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        head += f"Accept: {accept}\r\n"
        self._answer = asyncio.get_running_loop().create_future()
        self._chunks, self._num_missing = [], -1
        self._transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return await self._answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not instances of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._chunks.append(data)
        if self._num_missing < 0:
            self._read_head()
        else:
            self._num_missing -= len(data)
        if self._num_missing == 0:
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError("the server closed the connection in the middle of an answer"))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _read_head(self) -> None:
        received = b"".join(self._chunks)
        head, separator, body = received.partition(b"\r\n\r\n")
        if not separator:
            return
        lowered = head.lower()
        length = int(lowered.partition(b"content-length:")[2].partition(b"\r")[0])
        self._num_missing = length - len(body)
        self._is_last = head.startswith(b"HTTP/1.0") or b"connection: close" in lowered

    def _finish(self) -> None:
        assert self._answer is not None
        received = b"".join(self._chunks)
        if self._is_last and self._transport is not None:
            self._transport.abort()
            self._transport = None
        if self._answer.done():
            return
        if received[9:12] == b"200":
            self._answer.set_result(received[received.index(b"\r\n\r\n") + 4 :])
        else:
            self._answer.set_exception(ConnectionError(received[-300:].decode(errors="replace")))


class Load:
    def __init__(self, url: str, *, num_episodes: int, server_pid: int) -> None:
        parts = urlsplit(url)
        self._connections = [Connection(str(parts.hostname), int(parts.port or 80)) for _ in range(num_episodes)]
        self._server_pid = server_pid
        self._latencies_s: list[float] = []
        self._answer_bytes = 0

    async def run(self, *, warm_up_s: float, seconds: float) -> dict[str, Any]:
        opening = asyncio.Semaphore(NUM_OPENING)
        episode_ids = await asyncio.gather(*(self._open(connection, opening) for connection in self._connections))
        steppers = [
            asyncio.create_task(self._keep_stepping(connection, episode_id, index * STEP_S / len(episode_ids)))
            for index, (connection, episode_id) in enumerate(zip(self._connections, episode_ids, strict=True))
        ]
        try:
            await _first_failure(steppers, warm_up_s)
            self._latencies_s.clear()
            begin = _usage(self._server_pid)
            await _first_failure(steppers, seconds)
            end = _usage(self._server_pid)
        finally:
            for stepper in steppers:
                stepper.cancel()
            await asyncio.gather(*steppers, return_exceptions=True)
            for connection in self._connections:
                connection.close()
        used = {name: end[name] - begin[name] for name in begin}
        return {**used, "answer_bytes": self._answer_bytes, "latencies_s": self._latencies_s}

    async def _open(self, connection: Connection, opening: asyncio.Semaphore) -> str:
        async with opening:
            answer = await connection.post("/reset", json.dumps({"task_config": TASK, "env_config": {}}).encode())
        return str(json.loads(answer)["episode_id"])

    async def _keep_stepping(self, connection: Connection, episode_id: str, delay_s: float) -> None:
        await asyncio.sleep(delay_s)  # spread the steps of the episodes
        number, now = 0, time.perf_counter
        start = f'{{"episode_id": "{episode_id}", "action": "pyautogui.click(10, 20)", "pause": 0, "step": '
        while True:
            number += 1
            sent_at = now()
            answer = await connection.post("/step", f"{start}{number}}}".encode())
            self._latencies_s.append(now() - sent_at)
            self._answer_bytes = len(answer)


async def _first_failure(tasks: list[asyncio.Task[None]], seconds: float) -> None:
    """Returns after `seconds`, or raises the first error of a task."""
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        task.result()


def _usage(server_pid: int) -> dict[str, float]:
    own = resource.getrusage(resource.RUSAGE_SELF)
    with open("/proc/stat", encoding="ascii") as file:
        ticks = [int(field) for field in file.readline().split()[1:9]]
    return {
        "window_s": time.perf_counter(),
        "client_cpu_s": own.ru_utime + own.ru_stime,
        "server_cpu_s": cpu_s(server_pid),
        "machine_cpu_s": (sum(ticks) - ticks[3] - ticks[4]) / 100,
    }


def _new_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--server-pid", type=int, required=True)
    parser.add_argument("--episodes", type=int, required=True)
    parser.add_argument("--warm-up-s", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=3.0)
    arguments = parser.parse_args()
    with asyncio.Runner(loop_factory=_new_loop()) as runner:
        load = Load(arguments.url, num_episodes=arguments.episodes, server_pid=arguments.server_pid)
        result = runner.run(load.run(warm_up_s=arguments.warm_up_s, seconds=arguments.seconds))
    json.dump(result, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
