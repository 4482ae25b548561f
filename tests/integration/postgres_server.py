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

from osworld_pipeline.project import project_files, write_project

UNPRIVILEGED = 65_534
"""User and group of the server where this process is root."""
START_LIMIT_S = 60.0


@contextmanager
def running_postgres(address: str = "127.0.0.1", password: str = "") -> Iterator[int]:
    """The port of a new, empty server with the user `dagster`. It requires a password if one is given. Skips the test
    where Postgres is not installed."""
    pytest.importorskip("dagster_postgres", reason="the extra postgres is not installed")
    programs = postgres_folder()
    with tempfile.TemporaryDirectory(prefix="postgres-", dir="/tmp") as folder:
        if os.geteuid() == 0:
            os.chown(folder, UNPRIVILEGED, UNPRIVILEGED)
        data = f"{folder}/data"
        init = [str(programs / "initdb"), "-D", data, "-U", "dagster", "-N"]
        Path(folder, "password").write_text(password)
        init += ["-A", "scram-sha-256", f"--pwfile={folder}/password"] if password else ["-A", "trust"]
        done = subprocess.run(as_ordinary_user(init), capture_output=True, text=True, timeout=START_LIMIT_S, cwd="/")
        assert done.returncode == 0, done.stderr
        if password:
            with Path(data, "pg_hba.conf").open("a") as rules:
                rules.write("host all dagster samenet scram-sha-256\n")
        with socket.socket() as free:
            free.bind((address, 0))
            number = free.getsockname()[1]
        options = ["-c", f"listen_addresses={address}", "-c", "fsync=off", "-p", str(number), "-k", folder]
        command = as_ordinary_user([str(programs / "postgres"), "-D", data, *options])
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/")
        try:
            wait_for(number, server, address, password)
            yield number
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(30)


def make_project(folder: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes the files of `init --postgres`, and sets the variables by which its instance finds the server."""
    values = {"HOST": "127.0.0.1", "PORT": str(port), "DATABASE": "postgres", "USER": "dagster", "PASSWORD": ""}
    settings = {f"DAGSTER_PG_{name}": value for name, value in values.items()}
    settings |= {"DAGSTER_FILES": str(folder / "files"), "DAGSTER_HOME": str(folder)}
    settings["PWD"] = str(folder)  # Dagster's programs read .env, which uses PWD
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    write_project(folder, project_files(is_postgres=True))


def postgres_folder() -> Path:
    """The folder of the server's programs, which Debian does not put on PATH."""
    found = shutil.which("initdb")
    folders = [Path(found).parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not folders:
        pytest.skip("no Postgres here (apt-get install postgresql)")
    return folders[-1]


def as_ordinary_user(command: list[str]) -> list[str]:
    """Postgres refuses to run as root. The server stops when this process ends."""
    ids = [f"--reuid={UNPRIVILEGED}", f"--regid={UNPRIVILEGED}", "--clear-groups"] if os.geteuid() == 0 else []
    return ["setpriv", *ids, "--pdeathsig", "INT", "--", *command]


def wait_for(number: int, server: subprocess.Popen[bytes], address: str, password: str) -> None:
    import psycopg2

    deadline = time.monotonic() + START_LIMIT_S
    while True:
        with suppress(psycopg2.OperationalError):
            psycopg2.connect(host=address, port=number, user="dagster", dbname="postgres", password=password).close()
            return
        assert server.poll() is None, "Postgres ended"
        assert time.monotonic() < deadline, "Postgres did not come up"
        time.sleep(0.05)
