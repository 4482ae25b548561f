"""What `osworld-pipeline setup` installs: Debian packages by debian.sh, and Python environments of their own for sglang
and desktop-env. The lists are in this folder; every Python package is pinned with its hash."""

import subprocess
from collections.abc import Sequence
from importlib import resources

from osworld_pipeline.errors import DependencyError


def install_debian(parts: Sequence[str], *, is_dry_run: bool = False) -> None:
    """Names the missing packages of these parts and installs them; with `is_dry_run` prints the command that would.

    Raises:
        DependencyError: they could not be installed; the program has said why.
    """
    script = str(resources.files(__name__) / "debian.sh")
    done = subprocess.run(["bash", script, *(["--dry-run"] if is_dry_run else []), *parts], check=False)
    if done.returncode:
        raise DependencyError(f"the Debian packages of {', '.join(parts)} are not all installed: see above")
