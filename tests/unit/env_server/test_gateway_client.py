"""The reference client: what each answer means, and that its token is nowhere but in its header."""

import logging
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from gateway_doubles import TOKEN, URL
from hypothesis import given
from hypothesis import strategies as st

from env_server.config import make_settings, read_config
from env_server.main import make_provider
from env_server.providers.gateway.client import (
    ClientOptions,
    Sandbox,
    SandboxBusyError,
    SandboxFailedError,
    SandboxGoneError,
    SandboxRefusedError,
    SandboxRequest,
)
from env_server.providers.gateway.clients import load_client
from env_server.providers.gateway.https_client import HttpsSandboxClient, _retry_after_s
from env_server.providers.kinds import environment_for_programs
from env_server.settings import SettingsError
from osworld_pipeline.errors import DependencyError

SANDBOX = Sandbox(sandbox_id="a/b", session_id="s1")
CLICK = SandboxRequest(method="POST", path="/act", content_type="application/json", body=b"{}", request_id="r1")


def client(answer: Callable[[httpx.Request], httpx.Response]) -> HttpsSandboxClient:
    return HttpsSandboxClient(ClientOptions(url=f"{URL}/base/", token=TOKEN), transport=httpx.MockTransport(answer))


def answering(status: int, headers: dict[str, str] | None = None, text: str = "why") -> HttpsSandboxClient:
    return client(lambda _: httpx.Response(status, headers=headers or {}, json={"error": text}))


async def test_a_call_carries_token_session_and_its_own_name() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(500, headers={"X-Answered-By": "guest"}, content=b"the guest's own")

    got = await client(answer).request(SANDBOX, CLICK, limit_s=5)
    assert (got.status, got.body) == (500, b"the guest's own")
    assert str(seen[0].url) == f"{URL}/base/v1/sandboxes/a%2Fb/guest/act"
    assert seen[0].headers["authorization"] == f"Bearer {TOKEN}"
    assert (seen[0].headers["x-sandbox-session"], seen[0].headers["idempotency-key"]) == ("s1", "r1")


@pytest.mark.parametrize(
    ("status", "headers", "kind"),
    [
        (429, {"Retry-After": "7"}, SandboxBusyError),
        (429, {}, SandboxBusyError),
        (503, {"Retry-After": "7"}, SandboxBusyError),
        (503, {}, SandboxFailedError),
        (500, {}, SandboxFailedError),
        (502, {}, SandboxFailedError),
        (302, {"Location": "https://elsewhere.test"}, SandboxFailedError),
        (410, {}, SandboxGoneError),
        (404, {}, SandboxGoneError),
        (401, {}, SandboxRefusedError),
        (200, {}, SandboxRefusedError),
    ],
)
async def test_each_error_status_of_a_gateway_becomes_one_of_four_errors(
    status: int, headers: dict[str, str], kind: type[Exception]
) -> None:
    with pytest.raises(kind) as caught:
        await answering(status, headers).request(SANDBOX, CLICK, limit_s=5)
    assert type(caught.value) is kind
    assert TOKEN not in str(caught.value)
    if isinstance(caught.value, SandboxBusyError):
        assert caught.value.retry_after_s == (7.0 if headers else None)


async def test_a_call_whose_connection_was_refused_cannot_have_happened() -> None:
    def refuse(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    def hang_up(_: httpx.Request) -> httpx.Response:
        raise httpx.RemoteProtocolError("cut")

    for answer, may in ((refuse, False), (hang_up, True)):
        with pytest.raises(SandboxFailedError) as caught:
            await client(answer).request(SANDBOX, CLICK, limit_s=5)
        assert caught.value.may_have_happened is may


async def test_stopping_a_sandbox_that_is_gone_is_not_an_error() -> None:
    await answering(410).stop(SANDBOX, limit_s=5)


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"sandbox_id": 1}', b"\xff"])
async def test_an_invalid_answer_to_a_start_is_refused(body: bytes) -> None:
    with pytest.raises(SandboxRefusedError, match="is it a gateway of this kind"):
        await client(lambda _: httpx.Response(201, content=body)).start("r", limit_s=5)


@given(st.one_of(st.text(), st.floats().map(str), st.integers().map(str)))
def test_any_retry_after_is_read_as_a_time_or_as_none(text: str) -> None:
    seconds = _retry_after_s(text)
    assert seconds is None or 0 <= seconds < float("inf")


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("http://sandboxes.example.org", "to sandboxes.example.org unencrypted; use https"),
        ("sandboxes.example.org", "must be https"),
        ("https://user:pass@host", "without a user"),
        ("ftp://host", "must be https"),
    ],
)
def test_an_address_that_would_expose_the_token_is_refused(url: str, sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence) as caught:
        make_provider(settings(url))
    assert "pass" not in str(caught.value)


def settings(url: str | None, **options: object):
    return make_settings({"provider": "gateway", "gateway": {"url": url, **options}}, {"OSWORLD_SANDBOX_TOKEN": TOKEN})


def test_the_error_for_a_gateway_without_an_address_names_the_option() -> None:
    with pytest.raises(SettingsError, match="--gateway-url"):
        make_provider(settings(None))


def test_the_error_for_an_unknown_client_lists_the_known_clients() -> None:
    with pytest.raises(DependencyError, match="no sandbox client is named 'vendor'; known: https"):
        make_provider(settings(URL, client="vendor"))


@pytest.mark.parametrize("name", ["no.such.module:Client", "env_server.settings:nothing"])
def test_a_client_that_cannot_be_imported_is_reported(name: str) -> None:
    with pytest.raises(DependencyError, match="cannot be created"):
        load_client(name, ClientOptions(url=URL, token=""))


def test_a_vendors_client_is_made_of_its_options() -> None:
    made = load_client("test_gateway_client:Vendor", ClientOptions(url=URL, token="", extra={"pool": "big"}))
    assert isinstance(made, Vendor)
    assert made.options.extra == {"pool": "big"}


class Vendor:
    def __init__(self, options: ClientOptions) -> None:
        self.options = options


async def test_the_token_is_in_no_log_no_setting_and_no_programs_environment(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    made, options = settings(URL), ClientOptions(url=URL, token=TOKEN)
    with pytest.raises(SandboxFailedError):
        await HttpsSandboxClient(ClientOptions(url="http://127.0.0.1:9", token=TOKEN)).start("r", limit_s=2)
    assert TOKEN not in repr(made) + str(made) + made.model_dump_json() + repr(options) + caplog.text
    monkeypatch.setenv("OSWORLD_SANDBOX_TOKEN", TOKEN)
    monkeypatch.setenv("OSWORLD_METRICS_TOKEN", "secret")
    assert not {"OSWORLD_SANDBOX_TOKEN", "OSWORLD_METRICS_TOKEN"} & set(environment_for_programs())


def test_a_file_may_not_hold_the_token(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[gateway]\ntoken = 'secret'")
    with pytest.raises(SettingsError, match="set it in the environment: OSWORLD_SANDBOX_TOKEN"):
        read_config(tmp_path / "a.toml")
