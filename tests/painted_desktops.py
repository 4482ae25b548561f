"""Real env servers over painted desktops: `benchmarks.stub` with guests that stream a picture that changes. In this
process, or as a program: `python tests/painted_desktops.py --replicas 2 --ready-file FILE`."""

import argparse
import asyncio
import io
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from PIL import Image, ImageDraw
from pydantic import SecretStr

from benchmarks.stub import StubDesktop, StubDrivers, StubProvider
from env_server.guest_client import GuestClient
from env_server.serving import bind, run_server, serve
from env_server.settings import Settings

SIZE = (640, 400)
READY_S = 30.0
TASK: dict[str, Any] = {
    "id": "rename-note",
    "instruction": "Rename the note on the desktop to <b>done</b>.",
    "config": [],
    "evaluator": {"func": "infeasible"},
}


class PaintedGuest:
    def __init__(self, replica_id: str) -> None:
        self._replica_id = replica_id
        self.num_painted = 0
        self.num_streams = 0
        self.widths: list[int] = []

    async def frames(self, *, width: int, interval_s: float) -> AsyncIterator[bytes]:
        self.widths.append(width)
        self.num_streams += 1
        try:
            while True:
                self.num_painted += 1
                yield paint(self._replica_id, self.num_painted, "JPEG")
                await asyncio.sleep(interval_s)
        finally:
            self.num_streams -= 1

    async def screenshot(self, image_format: str, *, timeout_s: float) -> bytes:
        return paint(self._replica_id, self.num_painted, "JPEG")


class PaintedDesktop(StubDesktop):
    def __init__(self, replica_id: str) -> None:
        self.painted = PaintedGuest(replica_id)

    @property
    def guest(self) -> GuestClient:
        return cast("GuestClient", self.painted)


class PaintedProvider(StubProvider):
    def __init__(self) -> None:
        self.guests: dict[str, PaintedGuest] = {}

    async def start(self, replica_id: str) -> StubDesktop:
        desktop = PaintedDesktop(replica_id)
        self.guests[replica_id] = desktop.painted
        return desktop


def paint(name: str, number: int, image_format: str) -> bytes:
    """A desktop with a window that moves."""
    image = Image.new("RGB", SIZE, (38, 70, 108))
    draw = ImageDraw.Draw(image)
    left, top = 40 + (number * 11) % 220, 40 + (number * 7) % 120
    draw.rectangle((0, SIZE[1] - 26, *SIZE), fill=(24, 28, 34))
    draw.rectangle((left, top, left + 330, top + 200), fill=(244, 244, 240), outline=(20, 20, 20))
    draw.rectangle((left, top, left + 330, top + 24), fill=(88, 110, 140))
    draw.text((left + 8, top + 6), f"{name}: notes", fill=(255, 255, 255))
    for row in range(6):
        draw.text((left + 16, top + 40 + 22 * row), f"line {number + row}", fill=(30, 30, 30))
    buffer = io.BytesIO()
    image.save(buffer, image_format)
    return buffer.getvalue()


def drivers() -> StubDrivers:
    return StubDrivers(step_s=0.01, screenshot=paint("step", 0, "PNG"))


@dataclass(frozen=True, kw_only=True)
class PaintedServer:
    url: str
    provider: PaintedProvider
    serving: asyncio.Task[None]

    async def stop(self) -> None:
        self.serving.cancel()
        await asyncio.gather(self.serving, return_exceptions=True)


@asynccontextmanager
async def painted_server(folder: Path, *, num_replicas: int = 2, **options: Any) -> AsyncIterator[PaintedServer]:
    """A server in this process, on a free port of loopback."""
    ready = folder / "ready.json"
    settings = settings_with(ready, num_replicas, **options)
    provider = PaintedProvider()
    with bind(settings) as listener:
        serving = asyncio.create_task(serve(settings, provider, drivers(), listener))
        async with asyncio.timeout(READY_S):
            while not ready.exists():  # noqa: ASYNC110 - a file, as a program's start is awaited
                await asyncio.sleep(0.01)
        url = json.loads(ready.read_text())["url"]
        server = PaintedServer(url=url, provider=provider, serving=serving)
        try:
            yield server
        finally:
            await server.stop()


def settings_with(ready: Path, num_replicas: int, **options: Any) -> Settings:
    return Settings(
        num_replicas=num_replicas, port=options.pop("port", 0), ready_file=ready, drain_timeout_s=0.0,
        screen_width=SIZE[0], screen_height=SIZE[1], **options,
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, required=True)
    parser.add_argument("--ready-file", type=Path, required=True)
    arguments = parser.parse_args()
    token = os.environ.get("ENV_SERVER_TOKEN")
    settings = settings_with(arguments.ready_file, arguments.replicas, token=SecretStr(token) if token else None)
    with bind(settings) as listener:
        run_server(settings, PaintedProvider(), drivers(), listener)
    return 0


if __name__ == "__main__":
    sys.exit(main())
