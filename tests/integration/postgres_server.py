"""A Postgres server for the tests that need one."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

USER = "nobody"
START_LIMIT_S = 60.0


@contextmanager
def running_postgres() -> Iterator[int]:
    """The port of a new, empty server on loopback. Skips the test where Postgres is not installed."""
    pytest.importorskip("dagster_postgres", reason="the extra postgres is not installed")
    programs = postgres_folder()
    with tempfile.TemporaryDirectory(prefix="postgres-", dir="/tmp") as folder:
        if os.geteuid() == 0:
            shutil.chown(folder, USER)
        data = f"{folder}/data"
        init = [str(programs / "initdb"), "-D", data, "-U", "dagster", "-A", "trust", "-N"]
        done = subprocess.run(as_ordinary_user(init), capture_output=True, text=True, timeout=START_LIMIT_S, cwd="/")
        assert done.returncode == 0, done.stderr
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            number = free.getsockname()[1]
        options = ["-c", "listen_addresses=127.0.0.1", "-c", "fsync=off", "-p", str(number), "-k", folder]
        command = as_ordinary_user([str(programs / "postgres"), "-D", data, *options])
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/")
        try:
            wait_for(number, server)
            yield number
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(30)


def connection_settings(port: int) -> dict[str, str]:
    """The environment variables by which an instance of `init --postgres` finds the server."""
    values = {"HOST": "127.0.0.1", "PORT": str(port), "DATABASE": "postgres", "USER": "dagster", "PASSWORD": ""}
    return {f"DAGSTER_PG_{name}": value for name, value in values.items()}


def postgres_folder() -> Path:
    """Debian keeps the server's programs off PATH."""
    found = shutil.which("initdb")
    folders = [Path(found).parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not folders:
        pytest.skip("no Postgres here (apt-get install postgresql)")
    return folders[-1]


def as_ordinary_user(command: list[str]) -> list[str]:
    """Postgres refuses to run as root. It ends with whoever started it."""
    change = ["--reuid", USER, "--regid", "nogroup", "--clear-groups"] if os.geteuid() == 0 else []
    return ["setpriv", *change, "--pdeathsig", "INT", "--", *command]


def wait_for(number: int, server: subprocess.Popen[bytes]) -> None:
    import psycopg2

    deadline = time.monotonic() + START_LIMIT_S
    while True:
        with suppress(psycopg2.OperationalError):
            psycopg2.connect(host="127.0.0.1", port=number, user="dagster", dbname="postgres").close()
            return
        assert server.poll() is None, "Postgres ended"
        assert time.monotonic() < deadline, "Postgres did not come up"
        time.sleep(0.05)
