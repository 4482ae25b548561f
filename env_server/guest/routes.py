"""The routes of the guest protocol on this desktop."""

import os
import shutil
import time
from pathlib import Path
from typing import Any

from . import commands
from .accessibility_helper import AccessibilityHelper
from .calls import perform_calls
from .drives import is_windows_path, unix_path
from .fetching import fetch
from .frames import Frames
from .message_bus import MessageBuses
from .opening import opening_command
from .overrides import NO_USER_PACKAGES, Overrides
from .recording import Recorder, RecordingError
from .screen import Screen
from .server import Reply, Request, Route, StreamReply
from .settling import read_limit_s, wait_until_still
from .stillness import PIXEL_BYTES
from .terminal import TerminalReader
from .windows import Window, WindowManager
from .xinput import Input

WINDOW_WAIT_S = 5.0
DEFAULT_TIMEOUT_S = 120.0
MAX_FILE_BYTES = 256 * 1024 * 1024
"""Limit of a file that is read whole: an agent's file must not fill the desktop's memory when a grader reads it."""
MAX_LISTED = 50_000
MAX_DEPTH = 64
"""Depth limit of a folder that is listed; deeper folders are shown without children."""


class DesktopRoutes:
    def __init__(
        self,
        *,
        screen: Screen,
        device: Input,
        manager: WindowManager,
        terminal: TerminalReader,
        recorder: Recorder,
        buses: MessageBuses,
        window_wait_s: float = WINDOW_WAIT_S,
        home: Path,
    ) -> None:
        self._screen, self._device, self._manager = screen, device, manager
        self._terminal_reader, self._recorder, self._home = terminal, recorder, home
        self._window_wait_s = window_wait_s
        self._frames = Frames(screen)
        self._accessibility = AccessibilityHelper(buses)
        self._overrides = Overrides()
        self._wallpaper: Path | None = None
        self._routes: dict[tuple[str, str], Route] = {
            ("GET", "/screenshot"): self._screenshot,
            ("GET", "/frames"): self._stream_frames,
            ("GET", "/accessibility"): lambda _: Reply({"AT": self._accessibility.xml()}),
            ("GET", "/terminal"): self._terminal,
            ("GET", "/platform"): lambda _: Reply("Linux"),
            ("GET", "/cursor_position"): lambda _: Reply(list(self._device.position())),
            ("POST", "/act"): self._act,
            ("POST", "/execute"): self._execute,
            ("POST", "/setup/execute"): self._execute,
            ("POST", "/setup/execute_with_verification"): self._execute_with_verification,
            ("POST", "/execute_with_verification"): self._execute_with_verification,
            ("POST", "/run_python"): lambda r: _reply(commands.run_python(r.fields, home=str(self._home))),
            ("POST", "/run_bash_script"): lambda r: _reply(commands.run_bash_script(r.fields, home=str(self._home))),
            ("POST", "/setup/launch"): self._launch,
            ("POST", "/setup/upload"): self._upload,
            ("POST", "/setup/download_file"): self._download_file,
            ("POST", "/setup/open_file"): self._open_file,
            ("POST", "/setup/activate_window"): self._activate_window,
            ("POST", "/setup/close_window"): self._close_window,
            ("POST", "/setup/change_wallpaper"): self._change_wallpaper,
            ("POST", "/screen_size"): self._screen_size,
            ("POST", "/window_size"): self._window_size,
            ("POST", "/desktop_path"): lambda _: Reply({"desktop_path": str(self._home / "Desktop")}),
            ("POST", "/wallpaper"): self._read_wallpaper,
            ("POST", "/list_directory"): self._list_directory,
            ("POST", "/file"): self._file,
            ("POST", "/start_recording"): self._start_recording,
            ("POST", "/end_recording"): self._end_recording,
        }

    def find(self, method: str, path: str) -> Route | None:
        return self._routes.get((method, path))

    def _screenshot(self, request: Request) -> Reply:
        image_format, quality = request.query.get("format", "png"), request.query.get("quality")
        sides = [int(request.query.get(side, 0)) for side in ("width", "height")]
        size = (sides[0], sides[1]) if any(sides) else None
        data = self._screen.encode(image_format, None if quality is None else int(quality), size=size)
        return Reply(data, content_type=f"image/{image_format}")

    def _stream_frames(self, request: Request) -> Reply:
        query = request.query
        return StreamReply(self._frames.stream(int(query["width"]), float(query["interval_s"])))

    def _terminal(self, _: Request) -> Reply:
        text = self._terminal_reader.text()
        if text is None:
            text = self._accessibility.terminal_text()
        return Reply({"output": text, "status": "success"})

    def _act(self, request: Request) -> Reply:
        calls = request.fields.get("calls")
        if not isinstance(calls, list):
            raise ValueError("calls must be a list")
        if "settle_s" not in request.fields:
            perform_calls(self._device, calls)
            return Reply({"status": "success"})
        limit_s = read_limit_s(request.fields["settle_s"])
        before = self._screen.pixels()
        perform_calls(self._device, calls)
        width = self._screen.stride // PIXEL_BYTES
        settled_s = wait_until_still(self._screen.pixels, before, width=width, limit_s=limit_s)
        return Reply({"status": "success", "settled_s": settled_s})

    def _execute(self, request: Request) -> Reply:
        fields = request.fields
        is_graders = bool(fields.get("is_graders"))
        found = self._overrides.find() if is_graders else None
        if found is not None:
            return Reply({"status": "error", "error": found}, status=409)
        return _reply(
            commands.run_command(
                fields.get("command"),
                shell=bool(fields.get("shell")),
                timeout_s=float(fields.get("timeout") or DEFAULT_TIMEOUT_S),
                home=str(self._home),
                environment=NO_USER_PACKAGES if is_graders else None,
            )
        )

    def _execute_with_verification(self, request: Request) -> Reply:
        """Runs a command, then polls until its expected effect is there."""
        reply = self._execute(request)
        verification: dict[str, Any] = request.fields.get("verification") or {}
        if reply.status != 200 or not verification:
            return reply
        until = time.monotonic() + float(request.fields.get("max_wait_time") or 10)
        while not self._is_verified(verification):
            if time.monotonic() > until:
                message = "Verification failed: the expected effect did not appear in time"
                return Reply({"status": "error", "message": message}, status=500)
            time.sleep(float(request.fields.get("check_interval") or 1))
        return reply

    def _is_verified(self, verification: dict[str, Any]) -> bool:
        name, command = verification.get("window_exists"), verification.get("command_success")
        if name and self._manager.find(name, strict=False, by_class=False) is None:
            return False
        if command:
            argv = ["/bin/sh", "-c", str(command)]
            status, answer = commands.run_command(argv, shell=False, timeout_s=10, home=str(self._home))
            return status == 200 and answer["returncode"] == 0
        return True

    def _launch(self, request: Request) -> Reply:
        return _reply(
            commands.launch(
                request.fields.get("command"), shell=bool(request.fields.get("shell")), home=str(self._home)
            )
        )

    def _upload(self, request: Request) -> Reply:
        data = request.fields.get("file_data")
        if not isinstance(data, bytes):
            raise ValueError("file_data is required")
        path = self._path(request.text("file_path"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return Reply({"status": "success", "message": "File uploaded"})

    def _download_file(self, request: Request) -> Reply:
        url, path = request.text("url"), self._path(request.text("path"))
        complaint = fetch(url, path)
        if complaint is not None:
            return Reply({"status": "error", "error": complaint}, status=500)
        return Reply({"status": "success", "message": "File downloaded successfully"})

    def _open_file(self, request: Request) -> Reply:
        path = self._path(request.text("path"))
        if not path.exists():
            return Reply({"status": "error", "error": f"{path} does not exist"}, status=404)
        before = {window.window_id for window in self._manager.windows()}
        status, answer = commands.launch(opening_command(path), shell=False, home=str(self._home))
        until = time.monotonic() + self._window_wait_s
        while status == 200 and time.monotonic() < until:
            if any(w.window_id not in before for w in self._manager.windows()):
                break
            time.sleep(0.02)
        return _reply((status, answer))

    def _wait_for_window(self, request: Request) -> Window | None:
        name = request.text("window_name")
        strict, by_class = bool(request.fields.get("strict")), bool(request.fields.get("by_class"))
        until = time.monotonic() + self._window_wait_s
        while True:
            window = self._manager.find(name, strict=strict, by_class=by_class)
            if window is not None or time.monotonic() > until:
                return window
            time.sleep(0.02)

    def _activate_window(self, request: Request) -> Reply:
        window = self._wait_for_window(request)
        if window is None:
            return Reply({"status": "error", "error": f"no window {request.text('window_name')!r}"}, status=404)
        self._manager.activate(window)
        return Reply({"status": "success", "message": "Window activated"})

    def _close_window(self, request: Request) -> Reply:
        window = self._wait_for_window(request)
        if window is None:
            return Reply({"status": "error", "error": f"no window {request.text('window_name')!r}"}, status=404)
        self._manager.close(window)
        return Reply({"status": "success", "message": "Window closed"})

    def _change_wallpaper(self, request: Request) -> Reply:
        path = self._path(request.text("path"))
        self._manager.set_wallpaper(path)
        self._wallpaper = path
        uri = path.absolute().as_uri()
        if shutil.which("gsettings"):
            argv = ["gsettings", "set", "org.gnome.desktop.background", "picture-uri", uri]
            commands.run_command(argv, shell=False, timeout_s=10, home=str(self._home))
        return Reply({"status": "success", "message": "Wallpaper changed"})

    def _read_wallpaper(self, _: Request) -> Reply:
        if self._wallpaper is None:
            return Reply({"status": "error", "error": "no wallpaper was set"}, status=404)
        return _file_reply(self._wallpaper)

    def _screen_size(self, _: Request) -> Reply:
        width, height = self._device.size()
        return Reply({"width": width, "height": height})

    def _window_size(self, request: Request) -> Reply:
        window = self._manager.find(request.text("app_class_name"), strict=False, by_class=True)
        size = None if window is None else self._manager.size(window)
        if size is None:
            return Reply({"status": "error", "error": "no such window"}, status=404)
        return Reply({"width": size[0], "height": size[1]})

    def _list_directory(self, request: Request) -> Reply:
        path = self._path(request.text("path"))
        if not path.is_dir():
            return Reply({"status": "error", "error": f"{path} is not a folder"}, status=400)
        return Reply({"directory_tree": _Lister().tree(path)})

    def _file(self, request: Request) -> Reply:
        return _file_reply(self._path(request.text("file_path")))

    def _start_recording(self, _: Request) -> Reply:
        try:
            self._recorder.start()
        except RecordingError as error:
            return Reply({"status": "error", "message": str(error)}, status=error.status)
        return Reply({"status": "success", "message": "Started recording."})

    def _end_recording(self, _: Request) -> Reply:
        try:
            return _file_reply(self._recorder.stop())
        except RecordingError as error:
            return Reply({"status": "error", "message": str(error)}, status=error.status)

    def _path(self, text: str) -> Path:
        """A path as a person writes it: `~` and variables are expanded, relative to the home folder; or a Windows
        path."""
        if is_windows_path(text):
            return unix_path(text, self._home)
        return self._home / os.path.expandvars(os.path.expanduser(text))


class OsworldRoutes:
    """A guest without our extension /act and without parameters of the query, so that every screenshot is a PNG:
    simulates a foreign desktop."""

    def __init__(self, routes: DesktopRoutes) -> None:
        self._routes = routes

    def find(self, method: str, path: str) -> Route | None:
        route = self._routes.find(method, path)
        if path == "/act" or route is None:
            return None
        return lambda request: route(Request({}, request.fields))  # OSWorld's guest has one kind of screenshot


def _file_reply(path: Path) -> Reply:
    if not path.is_file():
        return Reply({"status": "error", "error": f"no such file: {path}"}, status=404)
    if path.stat().st_size > MAX_FILE_BYTES:
        return Reply({"status": "error", "error": f"{path} is larger than {MAX_FILE_BYTES} bytes"}, status=413)
    return Reply(path.read_bytes())


class _Lister:
    """Counts the entries it lists: a folder may contain the whole file system, or be arbitrarily deep."""

    def __init__(self) -> None:
        self._num_listed = 0

    def tree(self, path: Path, *, depth: int = 0) -> dict[str, Any]:
        """OSWorld's tree. An unreadable subfolder has no children; ValueError if there are too many entries."""
        self._num_listed += 1
        if self._num_listed > MAX_LISTED:
            raise ValueError(f"the folder holds more than {MAX_LISTED} files")
        try:
            if not path.is_dir() or path.is_symlink():
                return {"type": "file", "name": path.name}
            children = sorted(path.iterdir()) if depth < MAX_DEPTH else []
        except PermissionError:
            if depth == 0:
                raise
            children = []
        found = [self.tree(child, depth=depth + 1) for child in children]
        return {"type": "directory", "name": path.name, "children": found}


def _reply(answer: commands.Answer) -> Reply:
    status, body = answer
    return Reply(body, status=status)
