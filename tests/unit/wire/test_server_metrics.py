"""The requests of a server as Prometheus sees them."""

import socket
from collections.abc import Iterator
from contextlib import closing

import httpx
import pytest
from prometheus_client.core import Metric
from scraped import samples_of, scrape
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from osworld_pipeline.wire import metric_families as families
from osworld_pipeline.wire.metrics_endpoint import VARIABLE, MetricsSettingError
from osworld_pipeline.wire.server_metrics import ServerMetrics, observed_server


async def echo(request: Request) -> Response:
    return PlainTextResponse(await request.body())


APP = Starlette(routes=[Route("/echo/{name}", echo, methods=["GET", "PUT"])])


async def ask(app: ASGIApp, method: str, path: str, body: bytes = b"") -> int:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server") as client:
        return (await client.request(method, path, content=body)).status_code


async def test_requests_are_counted_by_route_and_not_by_path() -> None:
    metrics = ServerMetrics()
    app = metrics.observed(APP)
    for name in ("a", "b"):
        assert await ask(app, "PUT", f"/echo/{name}", b"1234") == 200
    assert await ask(app, "GET", "/nowhere") == 404
    assert await ask(app, "BREW", "/echo/a") == 405
    text = metrics.text().decode()
    found = samples_of(text)
    assert found["osworld_http_requests_total PUT echo 200"] == 2
    assert found["osworld_http_requests_total GET none 404"] == 1
    assert [name for name in found if "BREW" in name] == []
    assert found["osworld_http_received_bytes_total echo"] == 8
    assert found["osworld_http_sent_bytes_total echo"] == 8 + len("Method Not Allowed")
    assert found["osworld_http_request_seconds_count none"] == 1
    assert found["process_resident_memory_bytes"] > 0


async def test_a_server_without_the_setting_is_the_application_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with observed_server(APP) as observed:
        assert (observed.app, observed.target) == (APP, "")
    monkeypatch.setenv(VARIABLE, "everywhere")
    with pytest.raises(MetricsSettingError), observed_server(APP):
        raise AssertionError("it serves")


async def test_requests_and_further_readings_are_served_at_an_address_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, "0")

    def readings() -> Iterator[Metric]:
        yield families.QUOTA.reading(4)

    with observed_server(APP, readings) as observed:
        await ask(observed.app, "PUT", "/echo/a", b"1")
        found = scrape(observed.target)
    assert (found["osworld_gateway_quota"], found["osworld_http_requests_total PUT echo 200"]) == (4, 1)


async def test_a_server_whose_port_for_metrics_is_taken_runs_without_metrics(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        monkeypatch.setenv(VARIABLE, str(taken.getsockname()[1]))
        with observed_server(APP) as observed:
            assert (observed.app, observed.target) == (APP, "")
    assert "no metrics are served: 127.0.0.1 port" in caplog.text
