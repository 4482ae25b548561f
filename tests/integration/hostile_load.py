"""Policies on one env server, some of them hostile in every way at once and the others honest: what the honest ones
lose, how long they wait, and what the load costs the server."""

import asyncio
import itertools
import os
import random
import re
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from env_server_process import processes_below
from hostile_programs import GO, everything

from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import PipelineError, TamperingError
from osworld_pipeline.rollout.env_client import EnvClient
from osworld_pipeline.wire import EnvConfig

PAUSE_S, THINK_S = 0.1, 0.3
SAMPLE_INTERVAL_S = 0.25
_AWAIT_XTERM = "until xdotool search --onlyvisible --class XTerm windowactivate --sync; do sleep 0.1; done"
_AWAIT_ANSWER = "for i in $(seq 300); do test -s /tmp/answer && break; sleep 0.1; done; cat /tmp/answer"


def _task(task_id: str, config: list[dict[str, Any]], evaluator: dict[str, Any]) -> Task:
    return Task.from_config({"id": task_id, "instruction": "Answer.", "config": config, "evaluator": evaluator})


def _launch(*command: str) -> dict[str, Any]:
    return {"type": "launch", "parameters": {"command": list(command)}}


HONEST = _task(
    "honest",
    [
        _launch("xterm"),
        {"type": "execute", "parameters": {"command": f"timeout 100 sh -c '{_AWAIT_XTERM}'", "shell": True}},
    ],
    {
        "func": "exact_match",
        "result": {"type": "vm_command_line", "command": _AWAIT_ANSWER, "shell": True},
        "expected": {"type": "rule", "rules": {"expected": "right\n"}},
    },
)
"""To type `right` into a file. The grader waits for what a busy terminal has still to do."""


def hostile_task(seed: int, *, is_deadly: bool) -> Task:
    """Its programs attack once the policy has moved the pointer. It grades an endless command and giant files."""
    giants = [{"type": "vm_file", "path": f"/tmp/giant-{number}", "dest": str(number)} for number in range(3)]
    return _task(
        f"hostile-{seed}",
        [_launch("python3", "-c", everything(seed, is_deadly=is_deadly))],
        {
            "func": [*["file_contains"] * len(giants), "exact_match"],
            "conj": "or",
            "result": [*giants, {"type": "vm_command_line", "command": "cat /tmp/answer", "shell": True}],
            "expected": [
                *[{"type": "rule", "rules": {"expected": ["right"]}}] * len(giants),
                {"type": "rule", "rules": {"expected": "right\n"}},
            ],
        },
    )


@dataclass
class Seen:
    """What the policies of one run saw, and what the server took."""

    step_s: list[float] = field(default_factory=list)
    """Of honest steps, without their pause."""
    num_honest: int = 0
    """Episodes that came to their reward."""
    lost: list[str] = field(default_factory=list)
    """Faults and wrong rewards of honest episodes."""
    hostile: Counter[str] = field(default_factory=Counter)
    """How hostile episodes ended."""
    reasons: Counter[str] = field(default_factory=Counter)
    """What the server said of those that ended as tampering."""
    peak_mb: float = 0.0
    """The server and its grading processes, resident, in MB of 10**6 bytes."""

    @property
    def p99_s(self) -> float:
        return sorted(self.step_s)[len(self.step_s) * 99 // 100]

    def __str__(self) -> str:
        middle_s = sorted(self.step_s)[len(self.step_s) // 2]
        return (
            f"{self.num_honest} honest episodes, {len(self.step_s)} steps (p50 {middle_s:.3f} s, "
            f"p99 {self.p99_s:.3f} s), {len(self.lost)} lost; "
            f"hostile ones ended as {dict(self.hostile)}; server {self.peak_mb:.0f} MB at most"
        )


async def run_policies(
    url: str, server_pid: int, *, num_honest: int, num_hostile: int, seconds: float, seed: int
) -> Seen:
    """Each policy runs one episode after another until the time is over, and completes its last one."""
    seen, until = Seen(), time.monotonic() + seconds
    watching = asyncio.create_task(_watch_memory(server_pid, seen))
    everything_shown = EnvConfig(require_a11y_tree=True, require_terminal=True)
    try:
        async with (
            EnvClient(url, client_id="honest", env_config=EnvConfig(require_a11y_tree=False)) as honest,
            EnvClient(url, client_id="hostile", env_config=everything_shown) as hostile,
            asyncio.TaskGroup() as group,
        ):
            for number in range(num_honest):
                group.create_task(_honest_policy(honest, seen, random.Random(f"{seed}-{number}"), until))
            for number in range(num_hostile):
                group.create_task(_hostile_policy(hostile, seen, random.Random(f"{seed}-hostile-{number}"), until))
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
    return seen


async def _honest_policy(client: EnvClient, seen: Seen, rng: random.Random, until: float) -> None:
    await asyncio.sleep(rng.uniform(0.0, 1.0))
    while time.monotonic() < until:
        word, true_reward = rng.choice((("right", 1.0), ("wrong", 0.0)))
        desktop = client.desktop()
        try:
            await desktop.reset(HONEST)
            for action in (
                f"pyautogui.moveTo({rng.randrange(100, 500)}, {rng.randrange(100, 400)})",
                f"pyautogui.write('echo {word}')",
                "pyautogui.write(' > /tmp/answer')",
                "pyautogui.press('enter')",
                *(f"pyautogui.moveTo({rng.randrange(100, 500)}, 100)" for _ in range(4)),
            ):
                began = time.monotonic()
                await desktop.act(action, pause_s=PAUSE_S)
                seen.step_s.append(time.monotonic() - began - PAUSE_S)
                await asyncio.sleep(rng.uniform(0.5, 1.5) * THINK_S)
            reward = await desktop.score()
            if reward == true_reward:
                seen.num_honest += 1
            else:
                seen.lost.append(f"the reward {reward} for {word!r}")
        except PipelineError as error:
            seen.lost.append(f"{type(error).__name__}: {error}")
        finally:
            await desktop.close()


async def _hostile_policy(client: EnvClient, seen: Seen, rng: random.Random, until: float) -> None:
    for number in itertools.count():
        if time.monotonic() > until:
            return
        desktop = client.desktop()
        end = "fault in its set-up"
        try:
            await desktop.reset(hostile_task(rng.randrange(10**6), is_deadly=number % 2 == 0))
            end = "fault"
            await desktop.act(f"pyautogui.moveTo{GO}", pause_s=PAUSE_S)
            attack_until = min(time.monotonic() + rng.uniform(2.0, 12.0), until)
            while time.monotonic() < attack_until:
                await desktop.act(f"pyautogui.moveTo({rng.randrange(600)}, 5)", pause_s=PAUSE_S)
            end = "grading fault"
            end = f"reward {await desktop.score():g}"
        except TamperingError as error:
            end = "tampering"
            seen.reasons[re.sub(r"local-\d+", "N", str(error))[:120]] += 1
        except PipelineError as error:
            end = f"{end} ({type(error).__name__}: {str(error)[:160]})"
        finally:
            seen.hostile[end] += 1
            await desktop.close()


async def _watch_memory(server_pid: int, seen: Seen) -> None:
    """Records the peak memory until cancelled."""
    while True:
        graders = {pid for pid in await asyncio.to_thread(processes_below, server_pid) if _is_grader(pid)}
        seen.peak_mb = max(seen.peak_mb, sum(map(_resident_mb, {server_pid, *graders})))
        await asyncio.sleep(SAMPLE_INTERVAL_S)


def _is_grader(pid: int) -> bool:
    with suppress(OSError):
        return b"metric_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _resident_mb(pid: int) -> float:
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    return 0.0
