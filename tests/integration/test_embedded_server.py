"""The embedded env server that a program keeps between its uses."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.runs.rollouts.embedded_server import EnvServers, ServerSpec, embedded_env_server, kept_env_server

pytestmark = [pytest.mark.desktop, pytest.mark.slow, pytest.mark.timeout(120)]


def spec_of(folder: Path) -> ServerSpec:
    return ServerSpec(state=StateDir(folder), num_replicas=1, screen_width=512, screen_height=320)


def used(spec: ServerSpec) -> EnvServers:
    with embedded_env_server(spec) as servers:
        assert answers(servers)
    return servers


def answers(servers: EnvServers) -> bool:
    try:
        return httpx.get(f"{servers.urls[0]}/health", timeout=10).is_success
    except httpx.TransportError:
        return False


def await_true(condition: Callable[[], bool], limit_s: float = 10) -> None:
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until, "nothing happened"
        time.sleep(0.02)


def server_pids(spec: ServerSpec) -> list[int]:
    folder = str(spec.state.desktops).encode()
    lines = {path.parent.name: path for path in Path("/proc").glob("[0-9]*/cmdline")}
    return [int(pid) for pid, path in lines.items() if folder in read(path).split(b"\0")]


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_each_use_has_its_own_server_outside_a_block_that_keeps_one(tmp_path: Path) -> None:
    first, second = used(spec_of(tmp_path)), used(spec_of(tmp_path))
    assert first.token != second.token
    assert not answers(first)
    assert not answers(second)


def test_a_kept_server_serves_every_use_of_the_same_settings_and_ends_with_the_block(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    with kept_env_server():
        first = used(spec)
        assert used(spec) == first
        other = used(replace(spec, screen_width=640))
        assert other != first
        assert not answers(first), "one at a time: desktops take memory"
    assert not answers(other)
    assert not server_pids(spec)


def test_a_kept_server_that_died_is_replaced(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    with kept_env_server():
        first = used(spec)
        (pid,) = server_pids(spec)
        os.kill(pid, signal.SIGKILL)
        await_true(lambda: not answers(first))
        assert used(spec).token != first.token
