"""The command `receive-weights`, as a user starts it."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from osworld_pipeline.policy_servers.received_weights import INCOMING

TOKEN = "a-token"


@dataclass(kw_only=True)
class Receiver:
    root: Path
    url: str
    process: subprocess.Popen[bytes]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def stored(self) -> list[Path]:
        return sorted(path for path in self.root.iterdir() if not path.name.startswith("."))

    def incoming(self) -> list[Path]:
        return sorted(self.root.glob(f"{INCOMING}*"))


@contextmanager
def receiving(
    root: Path, *, port: int = 0, keep: int = 4, token: str = TOKEN, environment: Mapping[str, str] | None = None
) -> Iterator[Receiver]:
    program = [sys.executable, "-m", "osworld_pipeline.cli", "receive-weights", str(root)]
    process = subprocess.Popen(
        [*program, "--port", str(port), "--keep", str(keep)],
        env={**os.environ, "ENGINE_TOKEN": token, **(environment or {})},
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline().decode()
        (url,) = [word for word in line.split() if word.startswith("http://")]
        yield Receiver(root=root, url=url, process=process)
    finally:
        process.kill()
        process.wait(10)
        assert process.stderr is not None
        process.stderr.close()
