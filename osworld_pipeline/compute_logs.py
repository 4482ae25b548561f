"""The output of steps: like Dagster's own manager of local files, but no process outlives a killed run.

Dagster mirrors a file to the terminal with `tail`, and uses a second process to end it when the step is killed. A kill
between the two starts leaves a `tail` that does not exit.
"""

import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from os import getpid
from typing import Any, TextIO

from dagster._core.execution.compute_logs import redirect_to_file
from dagster._core.storage.compute_log_manager import CapturedLogContext, ComputeIOType
from dagster._core.storage.local_compute_log_manager import IO_TYPE_EXTENSION, LocalComputeLogManager
from dagster._serdes import ConfigurableClassData
from dagster._utils import ensure_file, touch_file

END_TIMEOUT_S = 30.0


class LocalLogs(LocalComputeLogManager):
    """Has the settings of Dagster's manager."""

    @classmethod
    def from_config_value(cls, inst_data: ConfigurableClassData | None, config_value: Mapping[str, Any]) -> "LocalLogs":
        return cls(inst_data=inst_data, **config_value)

    @contextmanager
    def capture_logs(self, log_key: Sequence[str]) -> Generator[CapturedLogContext, None, None]:
        if not sys.platform.startswith("linux"):  # `tail` differs
            with super().capture_logs(log_key) as captured:
                yield captured
            return
        out, err = (
            self.get_captured_local_path(log_key, IO_TYPE_EXTENSION[kind])
            for kind in (ComputeIOType.STDOUT, ComputeIOType.STDERR)
        )
        with _mirrored(sys.stdout, out), _mirrored(sys.stderr, err):
            yield CapturedLogContext(log_key)
        touch_file(self.complete_artifact_path(log_key))


@contextmanager
def _mirrored(stream: TextIO, path: str) -> Generator[None, None, None]:
    ensure_file(path)
    try:
        shown = stream.fileno()
    except OSError:  # in tests the stream is not a file
        shown = subprocess.DEVNULL
    tail = subprocess.Popen(["tail", "-F", "-c", "+0", f"--pid={getpid()}", path], stdout=shown)
    try:
        with redirect_to_file(stream, path):
            yield
    finally:
        tail.terminate()
        tail.wait(END_TIMEOUT_S)
