"""The guest agent's program: starts the desktop session, then answers the guest protocol until the X server ends."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
import argparse
import os
import socket
import sys
import threading
import time
from pathlib import Path

from Xlib.display import Display

from .routes import DesktopRoutes
from .screen import Screen
from .server import GuestServer
from .session import Session
from .terminal import TerminalReader
from .windows import WindowManager
from .xinput import Input

WINDOW_MANAGER_LIMIT_S = 20.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--height", type=int, required=True)
    parser.add_argument("--listener-fd", type=int, required=True, help="a socket that listens already")
    arguments = parser.parse_args()
    listener = socket.socket(fileno=arguments.listener_fd)
    os.set_inheritable(arguments.listener_fd, False)
    home, runtime = Path.home(), Path(f"/run/user/{os.getuid()}")
    session = Session(
        width=arguments.width,
        height=arguments.height,
        runtime=runtime,
        openbox_template=Path(__file__).with_name("assets") / "openbox.xml",
    )
    manager = WindowManager(Display("unix:0"))
    screen = Screen(session.framebuffer / "Xvfb_screen0", session.display)
    terminal = TerminalReader(Display("unix:0"), manager, runtime)
    routes = DesktopRoutes(
        screen=screen, device=Input(Display("unix:0")), manager=manager, terminal=terminal, home=home
    )
    session.wait_for_window_manager(WINDOW_MANAGER_LIMIT_S)
    threading.Thread(target=_end_with, args=(session,), daemon=True).start()
    GuestServer(listener, routes).serve_forever(poll_interval=60)


def _end_with(session: Session) -> None:
    session.x_server.wait()
    print("the X server ended", file=sys.stderr)
    time.sleep(0.05)
    os._exit(1)


if __name__ == "__main__":
    main()
