"""A plug-in for desktop-env: its VMs are desktops of this project, each kept by a helper process until it is
stopped."""

import contextlib
import json
import os
import select
import subprocess
from typing import Any

from .processes import kill_below

START_LIMIT_S = 300.0
"""The first desktop may have to build its image."""
STOP_LIMIT_S = 15.0
_NOWHERE = 1
"""Replaces the ports of browser, VNC and VLC, which a local desktop does not expose to the host."""


def create(region: str | None, options: dict[str, Any]) -> tuple["LocalManager", "LocalProvider"]:
    """`options["command"]` starts a helper that writes {host, port} and ends when its standard input is closed."""
    return LocalManager(), LocalProvider(list(options["command"]))


class LocalManager:
    def get_vm_path(self, **_: object) -> str:
        return "local"


class LocalProvider:
    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._helper: subprocess.Popen[bytes] | None = None
        self._address = ""

    def start_emulator(self, path_to_vm: str, headless: bool, os_type: str | None = None) -> None:
        if self._helper is not None:
            return
        self._helper = subprocess.Popen(
            [*self._command, "--parent", str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._helper.stdout is not None
        ready, _, _ = select.select([self._helper.stdout], [], [], START_LIMIT_S)
        line = self._helper.stdout.readline() if ready else b""
        if not line:
            raise RuntimeError("the local desktop did not start; the doctor of the env server tests this machine")
        ready = json.loads(line)
        self._address = f"{ready['host']}:{ready['port']}:{_NOWHERE}:{_NOWHERE}:{_NOWHERE}"

    def get_ip_address(self, path_to_vm: str) -> str:
        return self._address

    def save_state(self, path_to_vm: str, snapshot_name: str) -> None:
        raise NotImplementedError("a local desktop has one state, the fresh one")

    def revert_to_snapshot(self, path_to_vm: str, snapshot_name: str) -> str:
        self.stop_emulator(path_to_vm)
        return path_to_vm

    def stop_emulator(self, path_to_vm: str, *_: object) -> None:
        helper, self._helper = self._helper, None
        if helper is None:
            return
        assert helper.stdin is not None
        assert helper.stdout is not None
        with contextlib.suppress(OSError):
            helper.stdin.close()
        try:
            helper.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            kill_below(helper.pid)
            helper.kill()
            helper.wait()
        helper.stdout.close()
