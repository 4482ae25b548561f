"""The processes of one desktop session: X server, message bus, window manager. They start in parallel, and each signals
when it is ready; no fixed sleeps."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
import os
import select
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from Xlib import X, Xatom
from Xlib.display import Display

from .programs import start_program
from .terminal import terminal_resources

X_START_LIMIT_S = 20.0
SMALL_SCREEN_WIDTH = 1024
"""On smaller screens, programs whose windows open larger than the screen are maximized."""
BACKGROUND = 0x2E4A62
X_RESOURCES = """\
XTerm*faceName: DejaVu Sans Mono
XTerm*faceSize: {font_size}
XTerm*utf8: 1
XTerm*background: #ffffff
XTerm*foreground: #000000
XTerm*saveLines: 2000
XTerm*metaSendsEscape: true
"""
_FILLING = '<application class="{name}" type="normal"><maximized>yes</maximized></application>'


class Session:
    """Starts on creation; `display` is connected once `__init__` returns."""

    def __init__(
        self,
        *,
        width: int,
        height: int,
        runtime: Path,
        openbox_template: Path,
        has_x_server: bool = False,
        is_any_display: bool = False,
    ) -> None:
        """With `has_x_server` display :0 is already running, as in a virtual machine, and `x_server` stays None. With
        `is_any_display` a free display is used, and DISPLAY is set for every program started later."""
        self.runtime = runtime
        self.x_server: subprocess.Popen[bytes] | None = None
        self.display_name = "unix:0"
        x_is_ready = None if has_x_server else self._start_x_server(width, height, is_any_display=is_any_display)
        if x_is_ready is not None and is_any_display:
            number = _await_line(x_is_ready, X_START_LIMIT_S)
            self.display_name = f"unix:{number}"
            os.environ["DISPLAY"] = f":{number}"
        self.bus_socket = runtime / "bus"
        address = f"--address=unix:path={self.bus_socket}"
        self.bus = _start(["dbus-daemon", "--session", "--nofork", "--nopidfile", address])
        rules = "".join(_FILLING.format(name=name) for name in ("Mousepad", "Pcmanfm"))
        config = openbox_template.read_text().replace("@RULES@", rules if width < SMALL_SCREEN_WIDTH else "")
        (runtime / "openbox.xml").write_text(config)
        if x_is_ready is not None:
            if not is_any_display:
                _await_line(x_is_ready, X_START_LIMIT_S)
            os.close(x_is_ready)
        self.display = Display(self.display_name)
        self._dress(width)
        self._ready = runtime / "window-manager-ready"
        # The startup command runs last, when the keys are grabbed; the window manager is visible well before that.
        self.window_manager = _start(
            ["openbox", "--config-file", str(runtime / "openbox.xml"), "--startup", f"touch {self._ready}"]
        )

    def _start_x_server(self, width: int, height: int, *, is_any_display: bool) -> int:
        """Returns a file descriptor to which the X server writes once it accepts connections."""
        read_end, write_end = os.pipe()
        self.x_server = _start(
            [
                "Xvfb",
                *([] if is_any_display else [":0"]),
                "-screen",
                "0",
                f"{width}x{height}x24",
                "-nolisten",
                "tcp",
                "-noreset",
                "-ac",
            ],
            ["-shmem", "-displayfd", str(write_end), "+extension", "XTEST"],
            pass_fds=(write_end,),
        )
        os.close(write_end)
        return read_end

    def wait_until_whole(self, limit_s: float) -> None:
        """Returns when key bindings work and the bus accepts connections. TimeoutError after `limit_s`, ConnectionError
        if one of the programs has ended: an incomplete desktop is not used."""
        until = time.monotonic() + limit_s
        while not (self._ready.exists() and self.bus_socket.exists()):
            self._check_programs()
            if time.monotonic() > until:
                raise TimeoutError(f"openbox and dbus-daemon were not ready within {limit_s:g} s")
            time.sleep(0.004)
        self._check_programs()

    def _check_programs(self) -> None:
        for name, program in (("dbus-daemon", self.bus), ("openbox", self.window_manager)):
            if program.poll() is not None:
                raise ConnectionError(f"{name} ended before the desktop was ready")

    def has_ended(self) -> bool:
        """Whether the X server, and with it the desktop, has ended."""
        return self.x_server is not None and self.x_server.poll() is not None

    def _dress(self, width: int) -> None:
        """Background, terminal colours, and no key repeat (which would depend on the machine's load)."""
        root = self.display.screen().root
        resources = X_RESOURCES.format(font_size=8 if width < SMALL_SCREEN_WIDTH else 11)
        resources += terminal_resources(self.runtime)
        root.change_property(Xatom.RESOURCE_MANAGER, Xatom.STRING, 8, resources.encode())
        root.change_attributes(background_pixel=BACKGROUND)
        root.clear_area()
        self.display.change_keyboard_control(auto_repeat_mode=X.AutoRepeatModeOff)
        self.display.sync()


def _await_line(read_end: int, limit_s: float) -> int:
    """The X server's number. It writes number and newline separately, and exits if it cannot write the second."""
    line, until = b"", time.monotonic() + limit_s
    while not line.endswith(b"\n"):
        if not select.select([read_end], [], [], max(0.0, until - time.monotonic()))[0]:
            raise TimeoutError(f"Xvfb was not ready within {limit_s:g} s")
        piece = os.read(read_end, 16)
        if not piece:
            raise ConnectionError("Xvfb ended before it was ready")
        line += piece
    return int(line)


def _start(*argv: Sequence[str], pass_fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    # Only the X server may write to the host's standard error; programs of the window manager inherit its own.
    error = None if pass_fds else subprocess.DEVNULL
    return start_program(
        [word for part in argv for word in part],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=error,
        pass_fds=pass_fds,
        serves_calls=bool(pass_fds),
    )
