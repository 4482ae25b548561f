"""What env servers say they are: the grounds on which a grader's score holds."""

from collections.abc import Callable

import httpx
import pytest

from osworld_pipeline.errors import EnvServerError
from osworld_pipeline.rollout.env_client import EnvClient
from osworld_pipeline.runs.rollouts.grounds import Grounds, grounds_of_servers

OURS = {"version": "1", "image_digest": "abc", "grader_version": "g1", "num_replicas": 2}


def client_of(*urls: str, answer: Callable[[httpx.Request], httpx.Response]) -> EnvClient:
    return EnvClient(urls, token="t", transport=httpx.MockTransport(answer))


async def test_each_server_tells_its_image_and_its_grader() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/v1/server"
        assert request.headers["Authorization"] == "Bearer t"
        return httpx.Response(200, json={**OURS, "image_digest": request.url.host})

    async with client_of("http://a:1", "http://b:1", answer=answer) as client:
        assert await grounds_of_servers(client) == {
            Grounds(image_digest="a", grader_version="g1"),
            Grounds(image_digest="b", grader_version="g1"),
        }


async def test_a_server_of_another_make_says_nothing_and_every_word_counts() -> None:
    async with client_of("http://a:1", answer=lambda request: httpx.Response(404, json={})) as client:
        assert await client.describe() == (None,)
        assert await grounds_of_servers(client) is None


async def test_a_server_that_is_gone_is_named() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    async with client_of("http://a:1", answer=answer) as client:
        with pytest.raises(EnvServerError, match="no env server answers at http://a:1"):
            await client.describe()
