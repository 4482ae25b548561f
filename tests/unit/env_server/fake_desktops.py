"""A provider whose desktops are in memory and answer the guest protocol as a real guest does, through the real client.
The server's unit tests run on it."""

import asyncio
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs

import httpx

from env_server.guest_client import GuestClient
from env_server.replicas.pool import Pool
from osworld_pipeline.errors import ReplicaError

PNG = b"\x89PNG\r\n\x1a\n"
Answer = tuple[int, dict[str, Any]]


class FakeDesktop:
    """`commands` maps a command to the answer of /execute; `files` is what /file reads."""

    def __init__(self, replica_id: str) -> None:
        self.replica_id = replica_id
        self.commands: dict[str, Answer] = {}
        self.files: dict[str, bytes] = {}
        self.acts: list[list[dict[str, Any]]] = []
        self.settles_s: list[float | None] = []
        """Of each act: how long its screen was to be given at most, where the guest was to wait for it."""
        self.can_settle = True
        self.launched: list[Any] = []
        self.executed: list[Any] = []
        self.windows: set[str] = set()
        self.screen = 0
        self.alive = True
        self.cause: str | None = None
        """What a program of it did to end it."""
        self.disabled: str | None = None
        """How its programs disabled what answers for the accessibility tree."""
        self.host_lacked_memory = False
        self.num_resets = 0
        self.is_stopped = self.is_recording = False
        self.reset_delay_s = 0.0
        self.reset_error: Exception | None = None
        self.on_act: Callable[[FakeDesktop], None] = lambda desktop: None
        self.act_gate: asyncio.Event | None = None
        self.pictures: dict[str, bytes] = {}
        """What /screenshot answers by format; for a format that is missing, bytes that are not a picture, as PNG."""
        self._guest = GuestClient(
            httpx.AsyncClient(base_url="http://guest", transport=httpx.MockTransport(self._answer)), name=replica_id
        )

    @property
    def guest(self) -> GuestClient:
        return self._guest

    async def reset(self) -> None:
        await asyncio.sleep(self.reset_delay_s)
        if self.reset_error is not None:
            raise self.reset_error
        if not self.alive:
            raise ReplicaError(f"{self.replica_id} is dead")
        self.num_resets += 1
        self.files.clear()
        self.screen += 1

    def is_alive(self) -> bool:
        return self.alive

    async def cause_inside(self) -> str | None:
        return self.cause

    async def stop(self) -> None:
        self.is_stopped = True
        await self._guest.close()

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        if not self.alive:
            raise httpx.ConnectError("the guest is gone")
        path = request.url.path
        picture = self.pictures.get(request.url.params.get("format", "png"))
        if path == "/screenshot" and picture is not None:
            return httpx.Response(200, content=picture, headers={"content-type": "image/x"})
        if path == "/screenshot":
            return httpx.Response(200, content=PNG + str(self.screen).encode(), headers={"content-type": "image/png"})
        if path == "/accessibility" and self.disabled is not None:
            return httpx.Response(410, json={"status": "error", "error": self.disabled})
        if path == "/accessibility":
            return httpx.Response(200, json={"AT": "<desktop-frame/>"})
        if path == "/platform":
            return httpx.Response(200, text="Linux")
        if path == "/terminal":
            return httpx.Response(200, json={"output": "$ "})
        if path == "/file":
            name = parse_qs(request.content.decode())["file_path"][0]
            found = self.files.get(name)
            return httpx.Response(404) if found is None else httpx.Response(200, content=found)
        if path == "/setup/upload":
            self.files["uploaded"] = request.content
            return httpx.Response(200, json={"status": "success"})
        if path in ("/start_recording", "/end_recording"):
            return self._answer_recording(path)
        return await self._answer_json(path, json.loads(request.content or b"{}"))

    def _answer_recording(self, path: str) -> httpx.Response:
        is_start = path == "/start_recording"
        if is_start == self.is_recording:
            return httpx.Response(400, json={"status": "error", "message": "not now"})
        self.is_recording = is_start
        return httpx.Response(200, json={"status": "success"}) if is_start else httpx.Response(200, content=b"video")

    async def _answer_json(self, path: str, body: dict[str, Any]) -> httpx.Response:
        if path == "/act":
            if self.act_gate is not None:
                await self.act_gate.wait()
            self.acts.append(body["calls"])
            self.screen += 1
            self.on_act(self)
            self.settles_s.append(body.get("settle_s"))
            settled = {"settled_s": 0.0} if self.can_settle and "settle_s" in body else {}
            return httpx.Response(200, json={"status": "success", **settled})
        if path in ("/execute", "/setup/execute"):
            self.executed.append(body["command"])
            success = {"status": "success", "output": "", "error": "", "returncode": 0}
            status, fields = self.commands.get(str(body["command"]), (200, success))
            return httpx.Response(status, json=fields)
        if path == "/setup/launch":
            self.launched.append(body["command"])
            self.screen += 1
            return httpx.Response(200, json={"status": "success"})
        if path in ("/setup/activate_window", "/setup/close_window"):
            is_there = body["window_name"] in self.windows
            return httpx.Response(200 if is_there else 404, json={"error": "no such window"})
        return httpx.Response(404, json={"error": f"the fake has no {path}"})


class FakeProvider:
    """`failures` are raised by the next starts, one each."""

    name = "fake"
    image_digest = "f" * 64
    details = "in memory"

    def __init__(self) -> None:
        self.desktops: list[FakeDesktop] = []
        self.failures: list[Exception] = []
        self.is_closed = False
        self.prepare: Callable[[FakeDesktop], None] = lambda desktop: None

    async def start(self, replica_id: str) -> FakeDesktop:
        if self.failures:
            raise self.failures.pop(0)
        desktop = FakeDesktop(replica_id)
        self.prepare(desktop)
        self.desktops.append(desktop)
        return desktop

    async def close(self) -> None:
        self.is_closed = True

    def of(self, replica_id: str) -> FakeDesktop:
        """The latest desktop in a slot."""
        return [desktop for desktop in self.desktops if desktop.replica_id == replica_id][-1]


def fake_pool(provider: FakeProvider, num_replicas: int = 1, *, queue_timeout_s: float = 0.2) -> Pool:
    return Pool(provider, num_replicas=num_replicas, queue_timeout_s=queue_timeout_s, start_timeout_s=2.0)


async def until(condition: Callable[[], bool], limit_s: float = 3.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - any condition, not only an event
            await asyncio.sleep(0.005)
