"""The address of a process's metrics: which clients get an answer, and when it is not served at all."""

import socket
import time
from contextlib import closing

import httpx
import pytest

from osworld_pipeline.errors import DependencyError
from osworld_pipeline.wire.metrics_endpoint import (
    MAX_CLIENTS,
    MetricsAddress,
    MetricsSettingError,
    metrics_address,
    metrics_server,
)

HERE = MetricsAddress(host="127.0.0.1", ports=range(1))


def text() -> bytes:
    return b"one 1\n"


def get(target: str, path: str = "/metrics", **headers: str) -> httpx.Response:
    return httpx.get(f"http://{target}{path}", headers=headers, trust_env=False, timeout=10)


def test_without_the_setting_nothing_is_served() -> None:
    assert metrics_address({}) is None
    assert metrics_address({"OSWORLD_METRICS": " "}) is None


@pytest.mark.parametrize(
    ("given", "host", "ports"),
    [
        ("0", "127.0.0.1", range(1)),
        ("9500", "127.0.0.1", range(9500, 9501)),
        ("9500-9599", "127.0.0.1", range(9500, 9600)),
        ("[::1]:9500", "::1", range(9500, 9501)),
        ("localhost:0", "localhost", range(1)),
    ],
)
def test_an_address_is_a_port_a_range_or_any_port_of_loopback_or_of_a_host(given: str, host: str, ports: range) -> None:
    assert metrics_address({"OSWORLD_METRICS": given}) == MetricsAddress(host=host, ports=ports)


@pytest.mark.parametrize("given", ["yes", "host:", "70000", "-1", "9599-9500", "9500-", "127.0.0.1"])
def test_an_invalid_setting_is_refused_by_its_name(given: str) -> None:
    with pytest.raises(MetricsSettingError, match=r"OSWORLD_METRICS is .*: it must be \[HOST:\]PORT"):
        metrics_address({"OSWORLD_METRICS": given})


def test_a_network_is_served_only_with_a_token() -> None:
    with pytest.raises(MetricsSettingError, match=r"refusing to serve metrics on 0\.0\.0\.0 without a token"):
        metrics_address({"OSWORLD_METRICS": "0.0.0.0:0"})
    address = metrics_address({"OSWORLD_METRICS": "0.0.0.0:0", "OSWORLD_METRICS_TOKEN": "secret"})
    assert address == MetricsAddress(host="0.0.0.0", ports=range(1), token="secret")
    assert "secret" not in repr(address)
    with metrics_server(address, text) as target:
        host, _, port = target.rpartition(":")
        assert host == socket.gethostname()
        here = f"127.0.0.1:{port}"
        assert get(here).status_code == get(here, Authorization="Bearer other").status_code == 401
        assert get(here, Authorization="Bearer secret").text == "one 1\n"


def test_without_a_token_only_programs_of_this_machine_are_answered() -> None:
    with metrics_server(HERE, text) as target:
        answer = get(target)
        assert (answer.status_code, answer.text) == (200, "one 1\n")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert get(target, Host="evil.example").status_code == 403
        assert get(target, **{"Sec-Fetch-Site": "cross-site"}).status_code == 403
        assert get(target, "/other").status_code == 404
    with pytest.raises(httpx.ConnectError):
        get(target)


def test_the_first_free_port_of_a_range_is_used_and_a_range_without_one_is_named() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        if port < 65535:
            with metrics_server(MetricsAddress(host="127.0.0.1", ports=range(port, port + 2)), text) as target:
                assert target == f"127.0.0.1:{port + 1}"
        with (
            pytest.raises(DependencyError, match=f"no metrics are served: 127.0.0.1 port {port} cannot be used"),
            metrics_server(MetricsAddress(host="127.0.0.1", ports=range(port, port + 1)), text),
        ):
            raise AssertionError("it serves")


def test_clients_that_send_nothing_delay_neither_the_end_nor_another_client() -> None:
    with metrics_server(HERE, text) as target:
        host, _, port = target.rpartition(":")
        silent = [socket.create_connection((host, int(port))) for _ in range(MAX_CLIENTS - 1)]
        assert get(target).text == "one 1\n"
        started = time.monotonic()
    assert time.monotonic() - started < 2
    for one in silent:
        one.close()


def test_an_error_in_the_figures_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> bytes:
        raise ValueError("a defect")

    with metrics_server(HERE, broken) as target, pytest.raises(httpx.HTTPError):
        get(target)
    assert "the metrics cannot be read" in caplog.text
    assert "ValueError: a defect" in caplog.text
