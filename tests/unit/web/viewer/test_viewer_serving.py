"""Where the viewer listens, and what it says when it cannot."""

import socket

import pytest

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.web.viewer.serving import bind
from osworld_pipeline.web.viewer.settings import TOKEN_VARIABLE, ViewerError, ViewerSettings, token_from
from osworld_pipeline.wire.listening import url_of


def test_network_is_refused_without_a_token_and_served_with_one(tmp_path) -> None:
    with pytest.raises(ViewerError, match=TOKEN_VARIABLE):
        bind(ViewerSettings(state=StateDir(tmp_path), host="0.0.0.0", port=0))
    token = token_from({TOKEN_VARIABLE: " a secret "})
    with bind(ViewerSettings(state=StateDir(tmp_path), host="0.0.0.0", port=0, token=token)) as listener:
        assert url_of("0.0.0.0", listener).startswith("http://127.0.0.1:")
    assert token_from({TOKEN_VARIABLE: " "}) is None


def test_a_port_that_is_taken_is_reported_with_the_option_that_changes_it(tmp_path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        settings = ViewerSettings(state=StateDir(tmp_path), port=taken.getsockname()[1])
        with pytest.raises(ViewerError, match=r"Address already in use.*--port"):
            bind(settings)


def test_a_host_that_is_not_this_machine_is_reported(tmp_path) -> None:
    with pytest.raises(ViewerError, match="cannot listen on ::ffff"):
        bind(
            ViewerSettings(
                state=StateDir(tmp_path), host="::ffff:203.0.113.7", port=0, token=token_from({TOKEN_VARIABLE: "x"})
            )
        )
