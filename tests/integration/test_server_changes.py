"""A run over several env servers with real desktops: one joins, one drains, one is killed, and no episode is lost."""

import asyncio
import signal
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from env_server_process import RunningServer, running_env_server

from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import EnvServerError, ReplicaError
from osworld_pipeline.rollout import env_fleet
from osworld_pipeline.rollout.env_client import EnvClient
from osworld_pipeline.wire import EnvConfig
from osworld_pipeline.wire.listening import listen_on

pytestmark = [pytest.mark.desktop, pytest.mark.slow]

NUM_STEPS = 12
PAUSE_S = 0.2
JOIN_LIMIT_S = 10.0
FREEZE_LIMIT_S = 30.0
"""A call may take 120 s."""
TASK = Task.from_config(
    {
        "id": "make-a-file",
        "instruction": "Make the file yes.txt on the desktop.",
        "config": [{"type": "execute", "parameters": {"command": "touch ~/Desktop/yes.txt", "shell": True}}],
        "evaluator": {
            "func": "exact_match",
            "result": {"type": "vm_command_line", "command": "ls ~/Desktop", "shell": True},
            "expected": {"type": "rule", "rules": {"expected": "yes.txt\n"}},
        },
    }
)


class Run:
    """Six episodes at a time, each begun again on a fault, as a program does."""

    def __init__(self, client: EnvClient) -> None:
        self.client = client
        self.rewards: dict[int, float] = {}
        self.served: Counter[str] = Counter()
        """Episodes that ended with a reward, by server."""
        self.faults: Counter[str] = Counter()
        self.first_on: dict[str, float] = {}
        """When the first episode was opened on a server."""
        self.is_over = False

    async def work(self, worker: int) -> None:
        number = worker
        while not self.is_over:
            with suppress(ReplicaError, EnvServerError):
                self.rewards[number] = await self._episode()
                number += 6

    async def _episode(self) -> float:
        desktop = self.client.desktop()
        try:
            await desktop.reset(TASK)
            url = desktop.base_url
            self.first_on.setdefault(url, time.monotonic())
            try:
                for _ in range(NUM_STEPS):
                    await desktop.act("WAIT", pause_s=PAUSE_S)
                reward = await desktop.score()
            except (ReplicaError, EnvServerError):
                self.faults[url] += 1
                raise
            self.served[url] += 1
            return reward
        finally:
            await desktop.close()


async def until_served(run: Run, url: str, number: int) -> None:
    async with asyncio.timeout(60):
        while run.served[url] < number:  # noqa: ASYNC110 - the state of other tasks
            await asyncio.sleep(0.05)


async def test_no_episode_is_lost_while_servers_join_drain_freeze_and_die(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env_fleet, "LOOK_LIMIT_S", 1.0)
    monkeypatch.setattr(env_fleet, "SILENT_S", 3.0)
    images = tmp_path / "images"
    with ExitStack() as stack:

        def start(name: str, *options: str) -> RunningServer:
            (tmp_path / name).mkdir()
            return stack.enter_context(
                running_env_server(
                    tmp_path / name, "--screen-size", "640x480", *options, num_replicas=2, images=images / name
                )
            )

        with listen_on("127.0.0.1", 0) as reserved:
            late_port = reserved.getsockname()[1]
        late_url = f"http://127.0.0.1:{late_port}"
        drained, killed = start("drained", "--drain-episodes-s", "60"), start("killed")
        config = EnvConfig(screen_size=(640, 480), require_a11y_tree=False)
        async with EnvClient([drained.url, killed.url, late_url], env_config=config) as client:
            await client.connect()
            run = Run(client)
            working = [asyncio.create_task(run.work(worker)) for worker in range(6)]
            await until_served(run, drained.url, 2)
            assert late_url not in run.first_on

            late = await asyncio.to_thread(start, "late", "--port", str(late_port))
            assert late.url == late_url
            joined_at = time.monotonic()
            await until_served(run, late_url, 1)
            assert run.first_on[late_url] - joined_at < JOIN_LIMIT_S

            drained.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(drained.process.wait, 30) == 0
            assert run.faults[drained.url] == 0, "its episodes ended by themselves"

            # As if its network was cut: connections stay open, and nothing is answered.
            killed.process.send_signal(signal.SIGSTOP)
            async with asyncio.timeout(FREEZE_LIMIT_S):
                while not run.faults[killed.url]:  # noqa: ASYNC110 - the state of other tasks
                    await asyncio.sleep(0.05)

            killed.process.kill()
            num_before = run.served[late_url]
            await until_served(run, late_url, num_before + 4)
            run.is_over = True
            await asyncio.gather(*working)
    assert set(run.rewards.values()) == {1.0}
    assert set(run.faults) <= {killed.url}
    assert run.faults[killed.url] <= 2, "no more than it had desktops"
    for worker in range(6):
        numbers = sorted(number for number in run.rewards if number % 6 == worker)
        assert numbers == list(range(worker, worker + 6 * len(numbers), 6)), "none is left out"
