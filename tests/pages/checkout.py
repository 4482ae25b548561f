"""A checkout of its own with a small state, in which the commands of the documentation are run.

The folders are links to this checkout's; `var/` is its own, made by one run of the recipe `smoke`. These things
differ from a reader's shell: a command that takes a recipe and names none gets `smoke`, an example id is replaced by
the checkpoint of its stage, and ports are free ones.
"""

import os
import re
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from page_blocks import ROOT, PageBlock

LIMIT_S = 400.0
"""Of one block."""
SERVED_LIMIT_S = 180.0
"""Until a server says its address."""
AN_EPISODE = "$AN_EPISODE"
"""In a mark, as `with: EPISODE => $AN_EPISODE`: one of the state's."""
OWN = (".git", "var", ".venv", ".pytest_cache", ".ruff_cache", ".hypothesis", ".import_linter_cache")
_EXAMPLE_ID = re.compile(r"\b(base|sft|gspo_phase1|gspo_phase2)-[0-9a-f]{12}\b")
_PORT = re.compile(r"(?<=--port )\d{4}\b|(?<=127\.0\.0\.1:)\d{4}\b")
_WRAPPER = """#!/bin/sh
# A recipe that is not named is smoke.
case "$1" in
  demo|evaluate|backfill|collect|report)
    case " $* " in
      *" --recipe "*) ;;
      *) command=$1; shift; set -- "$command" --recipe smoke "$@" ;;
    esac ;;
esac
exec "{program}" "$@"
"""


@dataclass
class Checkout:
    root: Path
    environment: dict[str, str]
    ids: dict[str, str] = field(default_factory=dict)
    """Of the state's checkpoints, by stage."""
    ports: dict[str, int] = field(default_factory=dict)

    @classmethod
    def make(cls, root: Path) -> "Checkout":
        """A checkout with an empty state."""
        root.mkdir(parents=True, exist_ok=True)
        for path in ROOT.iterdir():
            if path.name not in OWN:
                (root / path.name).symlink_to(path)
        programs = ROOT / ".venv" / "bin"
        (root / ".venv").symlink_to(ROOT / ".venv")
        (root / "var" / "programs").mkdir(parents=True)
        wrapper = root / "var" / "programs" / "osworld-pipeline"
        wrapper.write_text(_WRAPPER.format(program=programs / "osworld-pipeline"))
        wrapper.chmod(0o755)
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("OSWORLD_", "DAGSTER_", "AWS_"))
        }
        path = f"{wrapper.parent}:{programs}:{os.environ['PATH']}"
        return cls(root=root, environment={**kept, "PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200"})

    def fill(self) -> None:
        """Makes the state, by the recipe `smoke`."""
        done = self.shell("osworld-pipeline demo")
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        self.know_ids()

    def know_ids(self) -> None:
        for path in sorted((self.root / "var" / "checkpoints").iterdir()):
            if found := _EXAMPLE_ID.fullmatch(path.name):
                self.ids[found[1]] = path.name

    def command_of(self, block: PageBlock) -> str:
        command = _EXAMPLE_ID.sub(lambda found: self.ids.get(found[1], found[0]), block.command)
        if AN_EPISODE in command:
            command = command.replace(AN_EPISODE, self._an_episode())
        return self.here(command)

    def here(self, text: str) -> str:
        """The text with the ports of this checkout."""
        return _PORT.sub(lambda found: str(self._port(found[0])), text)

    def shell(self, command: str, limit_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
        words = ["bash", "-e", "-o", "pipefail", "-c", command]
        with subprocess.Popen(
            words, cwd=self.root, env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                printed, reported = process.communicate(timeout=limit_s)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        return subprocess.CompletedProcess(words, process.returncode, printed, reported)

    @contextmanager
    def serving(self, command: str) -> Iterator[str]:
        """Runs the server until the block ends; gives its output up to its address."""
        process = subprocess.Popen(
            ["bash", "-e", "-o", "pipefail", "-c", command], cwd=self.root, env=self.environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            yield _until_address(process)
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def remove(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    def _an_episode(self) -> str:
        query = "SELECT min(episode_id) FROM episodes WHERE purpose = 'evaluate'"
        return self.shell(f'osworld-pipeline query "{query}" --format csv').stdout.split()[-1]

    def _port(self, written: str) -> int:
        if written not in self.ports:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.ports[written] = probe.getsockname()[1]
        return self.ports[written]


def _until_address(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    reported, deadline = b"", time.monotonic() + SERVED_LIMIT_S
    while b"http://" not in reported or not reported.endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        data = os.read(process.stdout.fileno(), 65_536) if ready else b""
        assert data, f"no address within {SERVED_LIMIT_S:g} s: {reported.decode(errors='replace')}"
        reported += data
    return reported.decode(errors="replace")
