"""`python -m osworld_pipeline.policy_servers.supervisor`: runs and restarts the sglang servers of one program.

Standard input: a line of JSON (`Orders`), then nothing; when the program ends for any reason, the end of file on this
input stops all servers. Standard output: a line with the address of each server that is ready for the first time, or
the error of a server that will never be ready. Later events are written to standard error.
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from osworld_pipeline.domain.parent import dies_with_parent
from osworld_pipeline.wire.certificates import trusted_certificates

POLL_S = 0.25
PING_S, PING_LIMIT_S = 10.0, 10.0
MAX_FAILED_PINGS = 6
"""Limit of failed pings in a row; then a server that was up counts as hung and is restarted."""
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
"""Pause before a restart; doubles with each restart within `WINDOW_S`."""
MAX_RESTARTS, WINDOW_S = 5, 1800.0
STOP_S, KILL_S = 15.0, 10.0
TAIL_BYTES = 4096
OF_TORCHRUN = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_", "ROLE_"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_"),
)
"""Prefixes of the variables that torchrun sets for a rank."""
READY, FAILED = "ready", "failed"


@dataclass(frozen=True, kw_only=True)
class ServerOrder:
    url: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    log: str
    """Log file to which the server's output is appended."""


@dataclass(frozen=True, kw_only=True)
class Orders:
    parent_pid: int
    start_timeout_s: float
    """How long a server may load its model."""
    servers: tuple[ServerOrder, ...]

    def as_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> "Orders":
        document: dict[str, Any] = json.loads(line)
        servers = tuple(ServerOrder(**order) for order in document.pop("servers"))
        return cls(servers=servers, **document)


@dataclass(frozen=True, kw_only=True)
class Message:
    kind: str
    """READY or FAILED."""
    url: str
    text: str = ""

    def as_line(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, line: bytes) -> "Message":
        return cls(**json.loads(line))


async def keep_up(order: ServerOrder, *, start_timeout_s: float) -> None:
    """Starts a server and restarts it whenever it ends or hangs, until this happens too often or the task is
    cancelled. A server that does not become ready at its first start is not restarted."""
    restarts: deque[float] = deque()
    ready = asyncio.Event()
    while True:
        why = await _run_once(order, start_timeout_s, ready)
        if not ready.is_set():
            _send(Message(kind=FAILED, url=order.url, text=why))
            return
        now = time.monotonic()
        while restarts and restarts[0] < now - WINDOW_S:
            restarts.popleft()
        if len(restarts) == MAX_RESTARTS:
            _say(f"{why}; it has been restarted {MAX_RESTARTS} times within {WINDOW_S / 60:g} minutes and stays down")
            return
        pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** len(restarts))
        restarts.append(now)
        _say(f"{why}; it is restarted in {pause_s:g} s")
        await asyncio.sleep(pause_s)


async def _run_once(order: ServerOrder, start_timeout_s: float, ready: asyncio.Event) -> str:
    """Returns why the server is down or did not start. `ready` is set, and the program notified, at the first start."""
    try:
        server = await _Server.start(order)
    except OSError as error:
        return f"the policy server at {order.url} cannot be run: {error}"
    try:
        why = await server.until_ready(start_timeout_s)
        if why:
            return why
        if not ready.is_set():
            ready.set()
            _send(Message(kind=READY, url=order.url))
        return await server.until_unwell()
    finally:
        await server.stop()


class _Server:
    """One start of a server."""

    def __init__(self, order: ServerOrder, process: asyncio.subprocess.Process, log_start: int) -> None:
        self._order, self._process, self._log_start = order, process, log_start

    @classmethod
    async def start(cls, order: ServerOrder) -> "_Server":
        with await asyncio.to_thread(Path(order.log).open, "ab") as log:
            start = log.tell()
            # The servers of a killed supervisor end with it.
            process = await asyncio.create_subprocess_exec(
                *("setpriv", "--pdeathsig", "KILL", "--", *order.arguments),
                env={**_outside_torchrun(os.environ), **order.environment},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return cls(order, process, start)

    async def until_ready(self, limit_s: float) -> str:
        """Why it did not become ready; empty if it did."""
        until = time.monotonic() + limit_s
        async with httpx.AsyncClient(trust_env=False, timeout=PING_LIMIT_S, verify=trusted_certificates()) as client:
            while time.monotonic() < until:
                if self._process.returncode is not None:
                    return self._ended()
                with suppress(httpx.HTTPError):
                    if (await client.get(f"{self._order.url}/ready")).status_code == httpx.codes.OK:
                        return ""
                await asyncio.sleep(POLL_S)
        return f"the policy server at {self._order.url} was not ready after {limit_s:g} s ({self._stderr_tail()})"

    async def until_unwell(self) -> str:
        """Waits until it has ended or stopped answering; returns which."""
        num_failed = 0
        async with httpx.AsyncClient(trust_env=False, timeout=PING_LIMIT_S, verify=trusted_certificates()) as client:
            while num_failed < MAX_FAILED_PINGS:
                with suppress(TimeoutError):
                    async with asyncio.timeout(PING_S):
                        await self._process.wait()
                    return self._ended()
                try:
                    # Unlike /ready, it returns 200 for a server that is paused while its weights change.
                    is_well = (await client.get(f"{self._order.url}/ping")).status_code == httpx.codes.OK
                except httpx.HTTPError:
                    is_well = False
                num_failed = 0 if is_well else num_failed + 1
        return f"the policy server at {self._order.url} did not answer {num_failed} pings in a row"

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL for the rest of its session. Takes at most STOP_S + KILL_S."""
        for number, limit_s in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, KILL_S)):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._process.wait()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _ended(self) -> str:
        status = self._process.returncode
        return f"the policy server at {self._order.url} ended with status {status} ({self._stderr_tail()})"

    def _stderr_tail(self) -> str:
        with Path(self._order.log).open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, size - TAIL_BYTES))
            lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        return f"its log {self._order.log} ends with: {lines[-1][:500]}" if lines else f"nothing in {self._order.log}"


async def _run(orders: Orders, loop_input: asyncio.StreamReader) -> None:
    keepers = [asyncio.create_task(keep_up(order, start_timeout_s=orders.start_timeout_s)) for order in orders.servers]
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    ends: Sequence[asyncio.Task[Any]] = [asyncio.create_task(loop_input.read()), asyncio.create_task(stopped.wait())]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for task in (*keepers, *ends):
        task.cancel()
    await asyncio.gather(*keepers, *ends, return_exceptions=True)


async def _main() -> int:
    # Ctrl-C at a terminal reaches the whole group; the program decides when its servers stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    line = await reader.readline()
    if not line:
        return 0
    orders = Orders.parse(line)
    if sys.platform == "linux" and not dies_with_parent(signal.SIGTERM, parent_pid=orders.parent_pid):
        return 0
    await _run(orders, reader)
    return 0


def _outside_torchrun(environ: Mapping[str, str]) -> dict[str, str]:
    """Removes torchrun's variables of a rank: with them a server would wait for that process group."""
    return {name: value for name, value in environ.items() if not name.startswith(OF_TORCHRUN)}


def _send(message: Message) -> None:
    """Flushes the message, because the program waits for it."""
    print(message.as_line(), flush=True)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(asyncio.run(_main()))
