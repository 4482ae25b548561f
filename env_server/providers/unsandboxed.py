"""A desktop without a sandbox: plain processes of the current user, for machines that allow no namespaces, and only if
the operator enables it. The actions of a model then run with that user's permissions."""

import os
from pathlib import Path

from env_server.providers.base_image import GUEST_PACKAGE
from env_server.providers.requirements import SYSTEM_PYTHON
from osworld_pipeline.errors import DependencyError


def check_ordinary_user() -> None:
    """DependencyError for root: a model must never act as root."""
    if os.geteuid() == 0:
        raise DependencyError(
            "a desktop without a sandbox would give a model root's permissions; start the env server as another user"
        )


def plain_command(image: Path, *, width: int, height: int, listener_fd: int) -> list[str]:
    """The whole command line; the desktop selects a free X display by itself."""
    site = next((image / "opt/local/lib").glob("python*/dist-packages"))
    imports = f"import sys; sys.path.insert(0, {str(site)!r}); from {GUEST_PACKAGE}"
    agent = [SYSTEM_PYTHON, "-Ic", f"{imports}.agent import main; main()", "--any-display"]
    agent += ["--width", str(width), "--height", str(height), "--listener-fd", str(listener_fd)]
    start = f"{imports}.plain_init import main; main()"
    return [SYSTEM_PYTHON, "-ISc", start, "--image", str(image), "--", *agent]
