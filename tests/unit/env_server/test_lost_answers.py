"""Our client and our server with a network between them that loses answers: every call still happens only once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from listening_server import Listening, listening
from surface_server import TASK

from osworld_pipeline.domain.task import Task
from osworld_pipeline.rollout.env_client import EnvClient, EnvTimeouts


class LossyNetwork:
    """Forwards every request to the server, and for the paths in `lost` breaks the connection instead of answering."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self.lost: dict[bytes, int] = {}
        """How many answers of a path are still to be lost."""
        self.seen: list[bytes] = []

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    head, body = await _message(reader)
                    path = head.split(b" ")[1]
                    self.seen.append(path)
                    upstream_writer.write(head + body)
                    answer = b"".join(await _message(upstream_reader))
                    if self.lost.get(path, 0) > 0:
                        self.lost[path] -= 1
                        return
                    writer.write(answer)
        finally:
            writer.close()
            upstream_writer.close()


async def _message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return head, await reader.readexactly(int(lengths[0]) if lengths else 0)


@asynccontextmanager
async def lossy(folder: Path) -> AsyncIterator[tuple[Listening, LossyNetwork, EnvClient]]:
    async with listening(folder) as server:
        network = LossyNetwork(server.port)
        carrying = await asyncio.start_server(network.carry, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{carrying.sockets[0].getsockname()[1]}"
        timeouts = EnvTimeouts(request_s=10.0, resend_s=10.0)
        async with carrying, EnvClient(url, timeouts=timeouts) as client:
            yield server, network, client


async def test_lost_answers_cause_no_second_click_and_no_second_desktop(tmp_path: Path) -> None:
    async with lossy(tmp_path) as (server, network, client):
        network.lost = {b"/reset": 1, b"/step": 2, b"/evaluate": 1}
        desktop = client.desktop()
        await desktop.reset(Task.from_config(TASK))
        await desktop.act("pyautogui.press('a')", pause_s=0.0)
        await desktop.act("pyautogui.press('a')", pause_s=0.0)
        assert await desktop.score() == 0.0
        (health,) = await client.health()
        assert (health.episodes, health.free) == (1, 1), "one desktop is taken, not two"
        await desktop.close()
        assert sum(len(desktop.acts) for desktop in server.provider.desktops) == 2
    assert (network.seen.count(b"/reset"), network.seen.count(b"/step")) == (2, 4)
    assert not any(network.lost.values())
