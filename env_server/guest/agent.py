"""The guest agent: starts the desktop session, then serves the guest protocol until the X server ends. In a virtual
machine and without a sandbox it runs as the desktop's user; in a sandbox it is process 1."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
import os
import socket
import tempfile
from pathlib import Path

from Xlib.display import Display

from .message_bus import MessageBuses
from .recording import Recorder
from .root_window import RootWindowScreen
from .routes import WINDOW_WAIT_S, DesktopRoutes, OsworldRoutes
from .screen import Screen
from .server import GuestServer
from .session import Session
from .shared_memory import SharedMemory
from .terminal import TerminalReader
from .windows import WindowManager
from .x_server_watch import XServerWatch
from .xinput import Input

WINDOW_MANAGER_LIMIT_S = 20.0
MACHINE_LIMIT_S = 120.0
"""The limit for the window manager in a virtual machine, which may be emulated and twenty times slower."""
MACHINE_WINDOW_WAIT_S = 45.0
"""The longest wait for a window in an emulated machine."""


def main() -> None:
    import argparse

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--height", type=int, required=True)
    parser.add_argument("--listener-fd", type=int, required=True, help="a listening socket")
    parser.add_argument("--use-running-x-server", action="store_true", help="use the running display :0")
    parser.add_argument("--any-display", action="store_true", help="use a free X display instead of :0")
    parser.add_argument("--runtime", type=Path, default=f"/run/user/{os.getuid()}", help="folder for sockets and state")
    parser.add_argument("--osworld-routes-only", action="store_true", help="leave out our extensions of the protocol")
    arguments = parser.parse_args()
    run_agent(
        arguments.listener_fd,
        width=arguments.width,
        height=arguments.height,
        runtime=arguments.runtime,
        has_x_server=arguments.use_running_x_server,
        is_any_display=arguments.any_display,
        osworld_routes_only=arguments.osworld_routes_only,
    )


def run_agent(
    listener_fd: int,
    *,
    width: int,
    height: int,
    runtime: Path,
    has_x_server: bool = False,
    is_any_display: bool = False,
    osworld_routes_only: bool = False,
) -> None:
    """Returns only when the desktop has ended."""
    listener = socket.socket(fileno=listener_fd)
    os.set_inheritable(listener_fd, False)
    session = Session(
        width=width,
        height=height,
        runtime=runtime,
        openbox_template=Path(__file__).with_name("assets") / "openbox.xml",
        has_x_server=has_x_server,
        is_any_display=is_any_display,
    )
    manager = WindowManager(Display(session.display_name))
    if session.x_server is None:
        screen: Screen = RootWindowScreen(session.display)
    else:
        screen = Screen(SharedMemory(session.x_server.pid), session.display)
    terminal = TerminalReader(Display(session.display_name), manager, runtime)
    buses = MessageBuses(session.bus, session.bus_socket)
    routes = DesktopRoutes(
        screen=screen,
        device=Input(Display(session.display_name)),
        manager=manager,
        terminal=terminal,
        recorder=Recorder(width=width, height=height, folder=Path(tempfile.gettempdir())),
        buses=buses,
        home=Path.home(),
        window_wait_s=WINDOW_WAIT_S if session.x_server is not None else MACHINE_WINDOW_WAIT_S,
    )
    session.wait_until_whole(MACHINE_LIMIT_S if session.x_server is None else WINDOW_MANAGER_LIMIT_S)
    buses.begin()
    if session.x_server is not None:
        XServerWatch(session.x_server, Display(session.display_name)).start()
    answered = OsworldRoutes(routes) if osworld_routes_only else routes
    GuestServer(listener, answered).serve_forever(poll_interval=60)


if __name__ == "__main__":
    main()
