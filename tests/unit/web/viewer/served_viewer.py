"""The viewer as a real server in this process, with its connections."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.web.viewer.app import create_app
from osworld_pipeline.web.viewer.serving import bind, make_server
from osworld_pipeline.web.viewer.settings import ViewerSettings


@asynccontextmanager
async def served(state: StateDir, **options: Any) -> AsyncIterator[int]:
    """Serves the viewer and yields its port."""
    settings = ViewerSettings(state=state, port=0, **options)
    listening = asyncio.Event()
    app = create_app(settings, is_ending=lambda: server.should_exit)
    server = make_server(app, settings, listening.set)
    with bind(settings) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await asyncio.wait(
                {serving, waiting := asyncio.create_task(listening.wait())}, return_when="FIRST_COMPLETED"
            )
            waiting.cancel()
            assert not serving.done(), serving
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await serving
