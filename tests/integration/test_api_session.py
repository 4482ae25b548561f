"""Runs the curl session of docs/env-server-api.md, unchanged, on a real desktop of a real env server."""

import os
import subprocess
from pathlib import Path

import pytest
from env_server_process import running_env_server
from page_blocks import matches, read_page

pytestmark = [pytest.mark.desktop, pytest.mark.slow]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "env-server-api.md"


def test_the_documented_curl_session_runs_and_prints_what_the_page_shows(tmp_path: Path) -> None:
    session = next(block for block in read_page(PAGE) if "curl" in block.text)
    with running_env_server(tmp_path, "--screen-size", "640x480") as server:
        done = subprocess.run(
            ["bash", "-ec", session.text], cwd=tmp_path, env={**os.environ, "SERVER": server.url},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert session.output is not None
    assert matches(session.output, done.stdout), done.stdout
    assert (tmp_path / "screen.png").read_bytes().startswith(b"\x89PNG")
