"""A load of episodes on a real env server while desktops, X servers, connections and clients are killed. It records
what the clients saw, to compare it with what the server reports."""

import asyncio
import json
import os
import random
import signal
import sys
import time
import uuid
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from env_server_process import desktops_below, processes_below

from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import NoCapacityError, PipelineError
from osworld_pipeline.rollout.env_client import EnvClient

ANSWER_LIMIT_S = 90.0
TASK = Task.from_config({
    "id": "always-right",
    "instruction": "Everything is done already.",
    "config": [{"type": "execute", "parameters": {"command": "echo right > /tmp/answer", "shell": True}}],
    "evaluator": {
        "func": "exact_match",
        "result": {"type": "vm_command_line", "command": "cat /tmp/answer", "shell": True},
        "expected": {"type": "rule", "rules": {"expected": "right\n"}},
    },
})  # fmt: skip
"""Its only true reward is 1.0: any other is a fault in disguise."""
CLIENT = """
import http.client, json, sys
def post(path, body):
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return json.loads(connection.getresponse().read())
connection = http.client.HTTPConnection(sys.argv[1], int(sys.argv[2]), timeout=60)
episode_id = post("/reset", {"task_config": json.loads(sys.argv[3]), "client_id": "killed"})["episode_id"]
while True:
    post("/step", {"episode_id": episode_id, "action": "pyautogui.press('a')", "pause": 0.05})
"""
"""A client in a process of its own, which works until it is killed."""

Seen = Literal["scored", "fault", "closed", "gone", "refused"]
HangUp = Literal["reset", "step", "evaluate"]
Kind = Literal["raw", "client", "killed", "reset", "step", "evaluate"]
"""Who drives an episode; the last three are a raw client whose connection breaks there."""


@dataclass
class Tally:
    """What the clients saw."""

    seen: Counter[Seen] = field(default_factory=Counter)
    num_hung_up_resets: int = 0
    """Each may have opened an episode whose answer no client received."""
    num_kills: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    """Answers that no server may give."""

    def check(self, path: str, status: int, fields: dict[str, Any]) -> None:
        if status >= 400 and ("reward" in fields or not fields.get("error") or not fields.get("fault")):
            self.wrong.append(f"{path} answered {status} with {json.dumps(fields)[:300]}")
        if status == 200 and path == "/evaluate" and fields.get("reward") != 1.0:
            self.wrong.append(f"{path} answered the reward {fields.get('reward')!r}")


class Raw:
    """Opens a connection for each request, so that one connection can be broken off."""

    def __init__(self, url: str, tally: Tally) -> None:
        parts = urlsplit(url)
        self.host, self.port = str(parts.hostname), int(parts.port or 80)
        self._tally = tally

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        async with asyncio.timeout(ANSWER_LIMIT_S):
            reader, writer = await asyncio.open_connection(self.host, self.port)
            try:
                writer.write(self._request(path, body))
                received = await reader.read()
            finally:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()
        head, _, content = received.partition(b"\r\n\r\n")
        status, fields = int(head[9:12]), json.loads(content)
        self._tally.check(path, status, fields)
        return status, fields

    async def hang_up(self, path: str, body: dict[str, Any], after_s: float) -> None:
        """Sends the request and closes the connection in the middle of it."""
        _, writer = await asyncio.open_connection(self.host, self.port)
        writer.write(self._request(path, body))
        await writer.drain()
        await asyncio.sleep(after_s)
        writer.transport.abort()

    def _request(self, path: str, body: dict[str, Any]) -> bytes:
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {self.host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


async def raw_episode(raw: Raw, tally: Tally, rng: random.Random, hang_up: HangUp | None) -> Seen:
    """Runs an episode over Slime-OSWorld's endpoints and breaks off the connection that `hang_up` names."""
    reset = {
        "task_config": dict(TASK.config),
        "env_config": {"require_a11y_tree": False},
        "client_id": f"raw-{rng.randrange(3)}",
        "request_id": uuid.UUID(int=rng.getrandbits(128)).hex,
    }
    if hang_up == "reset":
        tally.num_hung_up_resets += 1
        await raw.hang_up("/reset", reset, rng.uniform(0.01, 1.0))
        if rng.random() < 0.5:
            return "gone"
    status, fields = await raw.post("/reset", reset)
    if status != 200:
        return "refused" if status == 503 else "fault"
    episode_id = fields["episode_id"]
    try:
        for number in range(1, rng.randint(1, 4) + 1):
            step = {"episode_id": episode_id, "action": "pyautogui.press('a')", "pause": 0.05, "step": number}
            if hang_up == "step" and number == 1:
                await raw.hang_up("/step", step, rng.uniform(0.0, 0.1))
            status, fields = await raw.post("/step", step)
            if status != 200:
                return "fault"
            if fields["step"] != number:
                tally.wrong.append(f"step {number} was answered as step {fields['step']}")
        if rng.random() < 0.1:
            return "closed"
        if hang_up == "evaluate":
            await raw.hang_up("/evaluate", {"episode_id": episode_id}, rng.uniform(0.0, 0.05))
        status, fields = await raw.post("/evaluate", {"episode_id": episode_id})
        return "scored" if status == 200 else "fault"
    finally:
        await raw.post("/close", {"episode_id": episode_id})


async def client_episode(client: EnvClient, tally: Tally, rng: random.Random) -> Seen:
    """Runs an episode as a rollout does."""
    desktop = client.desktop()
    try:
        await desktop.reset(TASK)
        for _ in range(rng.randint(1, 4)):
            await desktop.act("pyautogui.moveTo(100, 100)", pause_s=0.05)
        reward = await desktop.score()
        if reward != 1.0:
            tally.wrong.append(f"the client scored {reward}")
        return "scored"
    except NoCapacityError:
        return "refused"
    except PipelineError:
        return "fault"
    finally:
        await desktop.close()


async def killed_client_episode(raw: Raw, tally: Tally, rng: random.Random) -> Seen:
    """Starts a whole client process that is killed in the middle of its episode."""
    tally.num_hung_up_resets += 1
    command = [sys.executable, "-ISc", CLIENT, raw.host, str(raw.port), json.dumps(dict(TASK.config))]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
    try:
        await asyncio.sleep(rng.uniform(0.3, 2.0))
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    return "gone"


async def run_load(url: str, server_pid: int, *, num_episodes: int, concurrency: int, seed: int) -> Tally:
    """Returns when the last client is done. No process is killed after that."""
    tally, rng = Tally(), random.Random(seed)
    raw = Raw(url, tally)
    kinds: list[Kind] = ["raw", "raw", "raw", "client", "client", "client", "reset", "step", "evaluate", "killed"]
    waiting: list[tuple[int, Kind]] = [(index, rng.choice(kinds)) for index in range(num_episodes)]
    chaos = asyncio.create_task(_kill_at_random(server_pid, tally, random.Random(seed + 1)))
    try:
        async with EnvClient(url, client_id="rollout") as client:

            async def work() -> None:
                while waiting:
                    index, kind = waiting.pop()
                    own = random.Random(f"{seed}-{index}")
                    if kind == "client":
                        seen = await client_episode(client, tally, own)
                    elif kind == "killed":
                        seen = await killed_client_episode(raw, tally, own)
                    elif kind == "raw":
                        seen = await raw_episode(raw, tally, own, None)
                    else:
                        seen = await raw_episode(raw, tally, own, kind)
                    tally.seen[seen] += 1

            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(work())
    finally:
        chaos.cancel()
        with suppress(asyncio.CancelledError):
            await chaos
    return tally


async def _kill_at_random(server_pid: int, tally: Tally, rng: random.Random) -> None:
    """Kills until cancelled: a desktop's guest agent (its process 1), its X server, or the bubblewrap around it."""
    while True:
        await asyncio.sleep(rng.uniform(0.4, 1.2))
        desktops = desktops_below(server_pid)
        if not desktops:
            continue
        bubblewrap = rng.choice(desktops)
        kind = rng.choice(("agent", "screen", "screen", "bubblewrap"))
        victim = first_inside(bubblewrap) if kind == "agent" else bubblewrap
        if kind == "screen":
            victim = program_inside(bubblewrap, "Xvfb")
        if victim is not None:
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
                tally.num_kills[kind] += 1


def first_inside(bubblewrap: int) -> int | None:
    """The sandbox's process 1, the guest agent."""
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/{bubblewrap}/task/{bubblewrap}/children").read_text().split()[0])
    return None


def program_inside(bubblewrap: int, name: str) -> int | None:
    for pid in processes_below(bubblewrap):
        with suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() == name:
                return pid
    return None


async def wait_until_free(url: str, num_replicas: int, limit_s: float) -> float:
    """Seconds until every replica is free and no episode is left; AssertionError after `limit_s`."""
    start = time.monotonic()
    async with EnvClient(url) as client:
        while True:
            (health,) = await client.health()
            passed_s = time.monotonic() - start
            if health.free == num_replicas and health.episodes == 0:
                return passed_s
            assert passed_s < limit_s, f"after {passed_s:.1f} s only {health.free} of {num_replicas} replicas are free"
            await asyncio.sleep(0.05)
