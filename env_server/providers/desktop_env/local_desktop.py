"""One local desktop for a program that is not the env server: it is started, served at a loopback port, and removed
when that program closes this one's standard input, or ends."""

import argparse
import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from env_server.providers.desktop_env.worker.processes import die_with_parent
from env_server.providers.local.provider import LocalProvider
from env_server.tcp_forward import tcp_forward
from osworld_pipeline.errors import PipelineError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--size", required=True, metavar="WIDTHxHEIGHT")
    parser.add_argument("--parent", type=int, required=True, metavar="PID")
    arguments = parser.parse_args()
    width, _, height = arguments.size.partition("x")
    try:
        die_with_parent(arguments.parent)
        asyncio.run(_show(arguments.images, (int(width), int(height))))
    except (PipelineError, ValueError, ProcessLookupError) as error:
        sys.exit(f"local desktop: {error}")


async def _show(images: Path, screen_size: tuple[int, int]) -> None:
    done, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, done.set)
    loop.add_reader(sys.stdin.fileno(), lambda: None if os.read(sys.stdin.fileno(), 64) else done.set())
    provider = LocalProvider(images=images, screen_size=screen_size)
    try:
        desktop = await provider.start("local")
        async with tcp_forward(desktop.guest) as (host, port):
            print(json.dumps({"host": host, "port": port}), flush=True)
            await done.wait()
    finally:
        await provider.close()
