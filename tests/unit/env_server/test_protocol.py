"""A client and a server work together only if they have the same protocol: real servers over desktops in memory."""

from pathlib import Path

import pytest
from listening_server import listening

from env_server.api.v1 import routes
from osworld_pipeline.errors import EnvServerError
from osworld_pipeline.rollout.env_client import EnvClient
from osworld_pipeline.rollout.env_fleet import ServerState
from osworld_pipeline.wire.protocol import PROTOCOL


async def test_a_server_reports_the_protocol_of_its_clients(tmp_path: Path) -> None:
    async with listening(tmp_path) as server, EnvClient(f"http://127.0.0.1:{server.port}") as client:
        await client.connect()
        assert [one.state for one in client.fleet.servers] == [ServerState.UP]
        report = await client.report_of(f"http://127.0.0.1:{server.port}")
        assert report is not None
        assert report.protocol == PROTOCOL


async def test_a_server_of_a_later_protocol_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "PROTOCOL", PROTOCOL + 1)
    async with listening(tmp_path) as server:
        url = f"http://127.0.0.1:{server.port}"
        async with EnvClient(url, may_mix_servers=True) as client:
            with pytest.raises(EnvServerError, match=rf"at {url} \(version .*\) has protocol {PROTOCOL + 1}, and this"):
                await client.connect()
