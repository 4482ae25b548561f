"""A real server, with its connections and its signals, over desktops in memory."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fake_desktops import FakeProvider, until

from env_server.driving.driver import Drivers
from env_server.main import make_drivers
from env_server.server_settings import ServerSettings
from env_server.serving import bind, serve


@dataclass(frozen=True, kw_only=True)
class Listening:
    port: int
    provider: FakeProvider
    serving: asyncio.Task[None]


@asynccontextmanager
async def listening(folder: Path, *, drivers: Drivers | None = None, **options: Any) -> AsyncIterator[Listening]:
    """Ends the server when the block ends, if a signal has not done so."""
    ready = folder / "ready.json"
    options = {"port": 0, "drain_timeout_s": 0.0, "num_replicas": 2, "ready_file": ready, **options}
    settings = ServerSettings.from_environment({}, **options)
    provider = FakeProvider()
    with bind(settings) as listener:
        serving = asyncio.create_task(serve(settings, provider, drivers or make_drivers(settings), listener))
        try:
            await until(ready.exists, 30.0)
            port = int(json.loads(ready.read_text())["url"].rpartition(":")[2])
            yield Listening(port=port, provider=provider, serving=serving)
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
