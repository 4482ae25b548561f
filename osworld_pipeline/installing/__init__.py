"""What `osworld-pipeline setup` installs: Debian packages by debian.sh, and separate Python environments for sglang and
desktop-env. The lists are in this folder; every Python package is pinned, and all but PyTorch's own have hashes."""

import subprocess
from collections.abc import Sequence
from importlib import resources

from osworld_pipeline.errors import DependencyError

_SCRIPT = str(resources.files(__name__) / "debian.sh")


def debian_command(parts: Sequence[str]) -> str:
    """The command for an administrator that installs the missing packages of these parts; empty if none is missing.

    Raises:
        DependencyError: this is no Debian or Ubuntu.
    """
    script = ["bash", _SCRIPT, "--dry-run", *parts]
    done = subprocess.run(script, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DependencyError(_last_sentence(done.stderr))
    return done.stdout.strip()


def install_debian(parts: Sequence[str], *, is_quiet: bool = False) -> None:
    """Names the missing packages of these parts and installs them. With `is_quiet` the script's messages are not shown,
    and the error quotes the last one.

    Raises:
        DependencyError: they could not be installed.
    """
    script = ["bash", _SCRIPT, *parts]
    done = subprocess.run(script, stdout=2, stderr=subprocess.PIPE if is_quiet else None, text=True, check=False)
    if done.returncode:
        reason = _last_sentence(done.stderr) if is_quiet else "see above"
        raise DependencyError(f"the Debian packages of {', '.join(parts)} are not all installed: {reason}")


def _last_sentence(text: str) -> str:
    """The last line that the script wrote, without the prefix `[setup]`."""
    lines = text.strip().splitlines()
    return lines[-1].rpartition("[setup]\033[0m ")[2] if lines else "the script ended without a message"
