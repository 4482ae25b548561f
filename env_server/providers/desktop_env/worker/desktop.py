"""One DesktopEnv and its VM, controlled call by call."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
import base64
import importlib
import importlib.util
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import desktop_env.desktop_env as osworld

from .fault import Fault
from .guest import GuestWatch

_ANY_STARTED_CLEAN = "docker"
"""The provider name for plug-ins. DesktopEnv accepts a closed list of names; with this one it assumes that a VM which
has just been started is clean, and does not reset it."""
_DOWNLOAD = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}_")
"""Names of the files that set-up has downloaded; they are kept for the next episode, all others are removed."""
Answer = tuple[dict[str, Any], bytes]


class _Controller(osworld.PythonController):
    def execute_python_command(self, command: str) -> Any:
        answer = super().execute_python_command(command)
        if answer is None:
            raise ConnectionError("the guest did not execute the command")
        return answer


class _SetupController(osworld.SetupController):
    def setup(self, *arguments: Any, **options: Any) -> bool:
        if not super().setup(*arguments, **options):
            raise ConnectionError("the guest cannot be reached")  # DesktopEnv would continue without the set-up
        return True


class _Env(osworld.DesktopEnv):
    """Observes on request instead of after every call."""

    def _get_obs(self) -> dict[str, Any]:
        return {}

    def look(self, *, with_tree: bool, with_terminal: bool) -> dict[str, Any]:
        self.require_a11y_tree, self.require_terminal = with_tree, with_terminal
        return super()._get_obs()


class Desktop:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._env: Any = None
        self._watch = GuestWatch()

    def on_start(self, options: dict[str, Any], plugin: str | None, plugin_options: dict[str, Any]) -> Answer:
        """Starts the VM; `plugin` (module:function, or file.py:function) replaces desktop-env's own providers."""
        osworld.PythonController, osworld.SetupController = _Controller, _SetupController
        # DesktopEnv's workaround rewrites source by pattern and unescapes strings; actions sent here do not need it.
        osworld._fix_pyautogui_less_than_bug = lambda command: command
        if plugin is not None:
            create = _load(plugin)
            osworld.create_vm_manager_and_provider = lambda _, region, use_proxy=False: create(region, plugin_options)
            options = {**options, "provider_name": _ANY_STARTED_CLEAN}
        self._env = _Env(cache_dir=str(self._folder), **options)
        self._env.reset()
        return self._address()

    def on_refresh(self) -> Answer:
        """Restores a fresh snapshot if the VM has been used."""
        self._env.reset()
        return self._address()

    def on_prepare(self, task: dict[str, Any]) -> Answer:
        cache = self._folder / "task"
        cache.mkdir(exist_ok=True)
        for path in cache.iterdir():
            if not _DOWNLOAD.match(path.name):
                path.unlink()
        for verb in task.get("config") or ():
            if verb["type"] == "upload_file":
                for index, file in enumerate(verb["parameters"]["files"]):
                    _place(file, self._folder / f"upload-{index}")
        try:
            self._env.reset(task_config={**task, "id": cache.name})
        except Exception as error:
            traceback.print_exc()
            self._address()  # the address may have changed
            raise Fault("setup" if self._watch.is_there() else "replica", f"{error}"[:1000]) from error
        finally:
            # DesktopEnv does not set this if the set-up failed.
            self._env.is_environment_used = True
        return self._address()

    def on_act(self, action: str, pause_s: float) -> Answer:
        self._watch.unanswered.clear()
        try:
            self._env.step(action, pause=pause_s)
        except ConnectionError as error:
            raise Fault("replica", str(error)) from error
        self._watch.check()
        return {}, b""

    def on_observe(self, with_tree: bool, with_terminal: bool) -> Answer:
        seen = self._env.look(with_tree=with_tree, with_terminal=with_terminal)
        if seen["screenshot"] is None or (with_tree and seen["accessibility_tree"] is None):
            raise Fault("replica", "the guest returned no screenshot, or no accessibility tree")
        return {"tree": seen["accessibility_tree"], "terminal": seen["terminal"]}, seen["screenshot"]

    def on_evaluate(self) -> Answer:
        return {"score": self._watch.score(self._env.evaluate)}, b""

    def close(self) -> None:
        if self._env is not None:
            self._env.close()

    def _address(self) -> Answer:
        self._watch.root = f"http://{self._env.vm_ip}:{self._env.server_port}"
        return {"host": self._env.vm_ip, "port": int(self._env.server_port)}, b""


def _place(file: dict[str, Any], path: Path) -> None:
    """Writes content that came with the task to a file that desktop-env can upload."""
    content = file.pop("content_base64", None)
    if content is not None:
        path.write_bytes(base64.b64decode(content))
        file["local_path"] = str(path)


def _load(plugin: str) -> Callable[..., Any]:
    place, _, name = plugin.rpartition(":")
    if not place.endswith(".py"):
        return getattr(importlib.import_module(place), name)
    spec = importlib.util.spec_from_file_location("desktop_env_plugin", place)
    assert spec is not None, "the name ends in .py"
    assert spec.loader is not None, "a file has a loader"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)
