"""The desktop image and grader that env servers report: a score is valid only for them."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from osworld_pipeline.domain.grounds import Grounds
from osworld_pipeline.errors import EnvServerError
from osworld_pipeline.rollout.env_client import EnvClient
from osworld_pipeline.wire.protocol import UNREPORTED

OURS = {"version": "1", "image_digest": "abc", "grader_version": "g1", "num_replicas": 2}


def client_of(*urls: str, server: Callable[[httpx.Request], httpx.Response], **options: Any) -> EnvClient:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/health":
            return httpx.Response(200, json={"episodes": 0, "replicas": 2, "free": 2})
        assert request.url.path == "/v1/server"
        return server(request)

    return EnvClient(urls, token="t", transport=httpx.MockTransport(answer), **options)


async def test_each_server_reports_its_image_and_its_grader() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["Authorization"] == "Bearer t"
        return httpx.Response(200, json={**OURS, "image_digest": request.url.host})

    async with client_of("http://a:1", "http://b:1", server=answer, may_mix_servers=True) as client:
        await client.connect()
        assert client.fleet.grounds() == {
            Grounds(image_digest="a", grader_version="g1"),
            Grounds(image_digest="b", grader_version="g1"),
        }
    async with client_of("http://a:1", "http://b:1", server=answer) as client:
        with pytest.raises(EnvServerError, match="http://b:1 has other desktops"):
            await client.connect()


async def test_a_server_of_another_implementation_reports_nothing_and_every_score_counts() -> None:
    async with client_of("http://a:1", server=lambda request: httpx.Response(404, json={})) as client:
        await client.connect()
        assert client.fleet.grounds() is None


async def test_a_server_that_reports_no_protocol_has_that_of_the_only_version_without_one() -> None:
    async with client_of("http://a:1", server=lambda request: httpx.Response(200, json=OURS)) as client:
        report = await client.report_of("http://a:1")
        assert report is not None
        assert (report.version, report.protocol) == ("1", UNREPORTED)


@pytest.mark.parametrize("protocol", [None, "1", True, 1.5])
async def test_a_protocol_that_is_not_a_number_is_refused(protocol: object) -> None:
    strange = {**OURS, "protocol": protocol}
    async with client_of("http://a:1", server=lambda request: httpx.Response(200, json=strange)) as client:
        with pytest.raises(EnvServerError, match="http://a:1/v1/server reports the protocol"):
            await client.connect()


async def test_a_server_that_is_gone_is_named() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    async with client_of("http://a:1", server=answer) as client:
        with pytest.raises(EnvServerError, match="no env server answers at http://a:1"):
            await client.connect()
