"""OSWorld's own grading of a desktop that is not desktop-env's: its unchanged evaluate, metrics and getters, in an
environment that has a guest's address and no VM."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
from pathlib import Path
from typing import Any

from desktop_env.desktop_env import DesktopEnv, PythonController

from .guest import GuestWatch

NOWHERE = 1
"""A port without a listener, used if the ports of browser and VLC are not forwarded."""
RETRY_INTERVAL_S = 0.2
"""Time between the attempts of desktop-env's controller; its own 5 s are for VMs that are still booting."""


class GradingEnv(DesktopEnv):
    """The attributes of an environment that getters use: a guest's address, a controller and a folder."""

    def __init__(
        self,
        folder: Path,
        *,
        host: str,
        port: int,
        task: dict[str, Any],
        last_action: str | None,
        password: str,
        chromium_port: int = NOWHERE,
        vlc_port: int = NOWHERE,
    ) -> None:
        # DesktopEnv's own would start a VM.
        self.vm_ip, self.server_port = host, port
        self.chromium_port, self.vlc_port, self.vnc_port = chromium_port, vlc_port, NOWHERE
        self.controller = PythonController(vm_ip=host, server_port=port)
        self.controller.retry_interval = RETRY_INTERVAL_S
        self.setup_controller = _SetUpAlready()
        self.os_type, self.provider_name, self.client_password = "Ubuntu", "docker", password
        self.enable_proxy = self.current_use_proxy = False
        self.is_environment_used = True
        self.cache_dir_base, self.cache_dir = str(folder.parent), str(folder)
        self.action_history = [] if last_action is None else [last_action]
        self.task_id, self.instruction, self.config = task["id"], task["instruction"], []
        self._set_evaluator_info(task)


class _SetUpAlready:
    """The env server's own verbs have already run the task's postconfig."""

    def setup(self, *_: object) -> bool:
        return True


def grade(folder: Path, **guest_and_task: Any) -> float:
    folder.mkdir(exist_ok=True)
    watch = GuestWatch()
    watch.root = f"http://{guest_and_task['host']}:{guest_and_task['port']}"
    # Reading the evaluator is part of grading: a task that OSWorld cannot read is a crash of the grader there too.
    return watch.score(lambda: GradingEnv(folder, **guest_and_task).evaluate())
