"""ServerSettings and the guard's first rule: no network without a token, and no token in printed output."""

import subprocess
import sys

import pytest

from env_server.server_settings import ServerSettings
from env_server.settings import SettingsError
from osworld_pipeline.wire.cross_site import is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_token(host: str) -> None:
    assert is_loopback(host)
    assert ServerSettings.from_environment({}, host=host).token is None


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "desktops.test", "localhost.evil.test"])
def test_an_address_beyond_loopback_needs_a_token(host: str) -> None:
    with pytest.raises(SettingsError, match="set ENV_SERVER_TOKEN, or bind to"):
        ServerSettings.from_environment({"ENV_SERVER_TOKEN": "  "}, host=host)
    token = ServerSettings.from_environment({"ENV_SERVER_TOKEN": "secret"}, host=host).token
    assert token is not None
    assert token.get_secret_value() == "secret"


def test_an_invalid_address_of_a_viewer_is_refused() -> None:
    assert ServerSettings.from_environment({}, viewer_url="https://viewer.test/").viewer_url == "https://viewer.test"
    with pytest.raises(ValueError, match="is not the address of a viewer"):
        ServerSettings.from_environment({}, viewer_url="javascript:alert(1)")


def test_token_does_not_show_in_a_printed_setting() -> None:
    settings = ServerSettings.from_environment({"ENV_SERVER_TOKEN": "very secret"})
    assert "very secret" not in repr(settings) + str(settings) + settings.model_dump_json()


@pytest.mark.parametrize(
    "arguments", [["--screen-size", "big"], ["--replicas", "0"], ["--port", "70000"], ["--provider", "none"]]
)
def test_wrong_argument_is_reported_in_the_last_line_and_starts_nothing(arguments: list[str]) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "env_server.main", *arguments], capture_output=True, text=True, timeout=30
    )
    assert run.returncode != 0
    assert "Traceback" not in run.stderr
    assert run.stderr.strip().splitlines()[-1].startswith("env-server: ")
    assert run.stdout == ""
