"""The version of the running code: the git commit of its checkout, or else the version of the distribution."""

import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from osworld_pipeline.domain.top_level_names import PACKAGES, ROOT
from osworld_pipeline.domain.version import DISTRIBUTION, installed_version

GIT_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class CodeOrigin:
    version: str
    """The commit (40 hex), or `osworld-pipeline 0.1.0`."""
    is_dirty: bool | None = None
    """Files of our packages differ from the commit, or are not in it; None outside a git checkout."""


@cache
def code_origin() -> CodeOrigin:
    """The origin of this program's code, cached at the first call, because files may change while it runs."""
    return origin_of(ROOT)


def origin_of(root: Path) -> CodeOrigin:
    """`root`: the folder with our packages. A virtual environment inside another checkout does not count as our
    checkout."""
    if _git(root, "ls-files", "--error-unmatch", f"{PACKAGES[0]}/__init__.py") is None:
        return CodeOrigin(version=_distribution())
    commit = _git(root, "rev-parse", "HEAD")
    changed = _git(root, "status", "--porcelain", "--", *(name for name in PACKAGES if (root / name).is_dir()))
    if not commit or changed is None:
        return CodeOrigin(version=_distribution())
    return CodeOrigin(version=commit, is_dirty=bool(changed))


def _distribution() -> str:
    return f"{DISTRIBUTION} {installed_version()}".rstrip()


def _git(root: Path, *arguments: str) -> str | None:
    """The output of git; None if it is missing, fails, or takes too long."""
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
