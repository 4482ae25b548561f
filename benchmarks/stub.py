"""A stub desktop: a step waits and returns the same picture, so that all time beyond the wait is the server's.
`python -m benchmarks.stub` serves it with the env server's own program; ENV_SERVER_TOKEN may have its token."""

import argparse
import asyncio
import io
import os
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from pydantic import SecretStr

from benchmarks.stub_step import SCREENSHOT, STEP_S
from env_server.driving.driver import View
from env_server.guest_client import GuestClient
from env_server.protocols import ProvidedDesktop
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
    step_s: float
    screenshot: bytes
    success_share: float

    async def prepare(self) -> None: ...

    async def act(self, action: str, *, pause_s: float, settle: str) -> None:
        await asyncio.sleep(self.step_s)

    async def observe(self, view: View) -> Observation:
        return Observation(
            screenshot=self.screenshot,
            image_format="png",
            accessibility_tree=None,
            terminal=None,
            instruction=self.task.instruction,
        )

    async def evaluate(self, *, last_action: str | None) -> float:
        return float(random.random() < self.success_share)

    async def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class StubPlan:
    task: Task
    step_s: float
    screenshot: bytes
    success_share: float

    def drive(self, desktop: ProvidedDesktop) -> StubDriver:
        return StubDriver(
            task=self.task, step_s=self.step_s, screenshot=self.screenshot, success_share=self.success_share
        )


@dataclass(frozen=True, kw_only=True)
class StubDrivers:
    step_s: float = STEP_S
    screenshot: bytes = SCREENSHOT
    success_share: float = 0.0
    """Share of the episodes that succeed, at random."""
    grader_version: str = "stub"

    def plan(self, task_config: Mapping[str, Any]) -> StubPlan:
        return StubPlan(
            task=Task.from_config(task_config),
            step_s=self.step_s,
            screenshot=self.screenshot,
            success_share=self.success_share,
        )

    async def close(self) -> None: ...


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, required=True)
    parser.add_argument("--ready-file", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--step-s", type=float, default=STEP_S)
    parser.add_argument("--drain-episodes-s", type=float, default=0.0)
    parser.add_argument("--screen-size", default="1920x1080", help="the size that it states")
    parser.add_argument("--success-share", type=float, default=0.0)
    parser.add_argument("--decodable", action="store_true", help="the picture is a PNG of one colour")
    arguments = parser.parse_args()
    width, height = map(int, arguments.screen_size.split("x"))
    settings = Settings(
        num_replicas=arguments.replicas,
        screen_width=width,
        screen_height=height,
        host=arguments.host,
        port=arguments.port,
        ready_file=arguments.ready_file,
        drain_episodes_s=arguments.drain_episodes_s,
        token=SecretStr(os.environ["ENV_SERVER_TOKEN"]) if "ENV_SERVER_TOKEN" in os.environ else None,
    )
    drivers = StubDrivers(
        step_s=arguments.step_s,
        screenshot=_one_colour() if arguments.decodable else SCREENSHOT,
        success_share=arguments.success_share,
    )
    with bind(settings) as listener:
        run_server(settings, StubProvider(), drivers, listener)
    return 0


def _one_colour() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), (40, 90, 140)).save(buffer, "PNG")
    return buffer.getvalue()


if __name__ == "__main__":
    sys.exit(main())
