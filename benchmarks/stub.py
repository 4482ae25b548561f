"""A stub desktop: a step waits and returns the same picture, so that all time beyond the wait is the server's.
`python -m benchmarks.stub` serves it with the env server's own program."""

import argparse
import asyncio
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.stub_step import SCREENSHOT, STEP_S
from env_server.episodes.driver import View
from env_server.guest_client import GuestClient
from env_server.providers.base import ProvidedDesktop
from env_server.serving import bind, run_server
from env_server.settings import Settings
from osworld_pipeline.domain.observation import Observation
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import ReplicaError


class StubDesktop:
    @property
    def guest(self) -> GuestClient:
        raise ReplicaError("a stub desktop has no guest")

    async def reset(self) -> None: ...

    def is_alive(self) -> bool:
        return True

    async def stop(self) -> None: ...


class StubProvider:
    name = "stub"
    image_digest = "0" * 64
    details = "a stub"

    async def start(self, replica_id: str) -> StubDesktop:
        return StubDesktop()

    async def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class StubDriver:
    task: Task

    async def prepare(self) -> None: ...

    async def act(self, action: str, *, pause_s: float, settle: str) -> None:
        await asyncio.sleep(STEP_S)

    async def observe(self, view: View) -> Observation:
        return Observation(
            screenshot=SCREENSHOT,
            image_format="png",
            accessibility_tree=None,
            terminal=None,
            instruction=self.task.instruction,
        )

    async def evaluate(self, *, last_action: str | None) -> float:
        return 0.0

    async def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class StubPlan:
    task: Task

    def drive(self, desktop: ProvidedDesktop) -> StubDriver:
        return StubDriver(task=self.task)


class StubDrivers:
    grader_version = "stub"

    def plan(self, task_config: Mapping[str, Any]) -> StubPlan:
        return StubPlan(task=Task.from_config(task_config))

    async def close(self) -> None: ...


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, required=True)
    parser.add_argument("--ready-file", type=Path, required=True)
    arguments = parser.parse_args()
    settings = Settings(num_replicas=arguments.replicas, port=0, ready_file=arguments.ready_file)
    with bind(settings) as listener:
        run_server(settings, StubProvider(), StubDrivers(), listener)
    return 0


if __name__ == "__main__":
    sys.exit(main())
