"""How everything that this project needs is set up: the only place of these commands, for errors and `doctor`."""

import importlib.metadata
import importlib.util
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from osworld_pipeline.domain.shown_commands import PIPELINE, shell_line
from osworld_pipeline.domain.top_level_names import ROOT
from osworld_pipeline.domain.version import DISTRIBUTION
from osworld_pipeline.errors import DependencyError

DEBIAN_PARTS: Mapping[str, str] = {
    "debian": "a local desktop",
    "extras": "Chrome tasks and recordings",
    "qemu": "virtual machines",
    "wine": "Windows programs on local desktops, 100 MB to download",
}
"""The purpose of each list of Debian packages, by the part's name."""
ENVIRONMENTS: Mapping[str, str] = {
    "sglang": "an sglang server on a CPU, 3 GB",
    "desktop-env": "OSWorld's DesktopEnv and graders, 1.3 GB",
}
"""The purpose of each separate Python environment, and its size on disk, by the part's name."""
IN_CHECKOUT = ("server", "pipeline", "train", "lora", "ray", "postgres", "s3", "tracing", "dev")
"""Extras for which `scripts/setup python` is the command in a checkout."""
EXTRAS = ("server", "pipeline", "train", "lora", "ray", "postgres")
"""Extras that `doctor` checks, in order; if several have a package, errors name the first."""
_MODULES = {"pillow": "PIL", "pyyaml": "yaml"}
"""Distributions whose module has another name."""
_OF_EXTRA = re.compile(r"(?P<name>[\w.-]+)[^;]*;.*\bextra == ['\"](?P<extra>[\w-]+)['\"].*")
"""A requirement of an extra in the distribution's metadata."""


def checkout() -> Path | None:
    """The repository's root; None if the package is installed as a wheel."""
    return ROOT if (ROOT / "scripts" / "setup").is_file() else None


def how_to_set_up(part: str, *words: object) -> str:
    """A command to paste; for `python` an instruction. `part`: of DEBIAN_PARTS or ENVIRONMENTS, `project` (a project
    folder), `python` (another Python), `uv`, or an extra of the distribution. `words`: arguments for the first three
    kinds."""
    if part in (*DEBIAN_PARTS, *ENVIRONMENTS):
        return shell_line(PIPELINE, "setup", part, *words)
    if part == "project":
        return shell_line(PIPELINE, "init", *words)
    root = checkout()
    if part == "uv":
        return _install("uv")
    if part == "python":
        return f"install python3.11, then {_new_environment(root)}"
    if root is not None and part in IN_CHECKOUT:
        return shlex.join([str(root / "scripts" / "setup"), "python"])
    return _install(f"--editable={root}[{part}]" if root else f"{DISTRIBUTION}[{part}]")


def _new_environment(root: Path | None) -> str:
    if root is not None:
        return f"PYTHON=python3.11 {root / 'scripts' / 'setup'} python"
    return f"make a virtual environment with it and install {DISTRIBUTION} there"


def _install(wanted: str) -> str:
    """The command that installs `wanted` into this Python environment. An environment made by uv has no pip, and may be
    used where uv is not on the PATH."""
    by_pip = shlex.join([sys.executable, "-m", "pip", "install", wanted])
    if importlib.util.find_spec("pip") is not None:
        return by_pip
    if shutil.which("uv") is not None:
        return shlex.join(["uv", "pip", "install", "--python", sys.executable, wanted])
    return f"{shlex.join([sys.executable, '-m', 'ensurepip'])} && {by_pip}"


def missing_package(module: str) -> DependencyError | None:
    """The error for a module that cannot be imported: names the extra that installs it. None if no extra but `dev`
    does."""
    name = module.partition(".")[0]
    found = [_OF_EXTRA.fullmatch(text) for text in importlib.metadata.requires(DISTRIBUTION) or ()]
    extras = [each["extra"] for each in found if each is not None and module_of(each["name"]) == name]
    extra = min(extras, key=lambda extra: EXTRAS.index(extra) if extra in EXTRAS else len(EXTRAS), default="dev")
    if extra == "dev":
        return None
    return DependencyError(f"{name} is not installed here; run `{how_to_set_up(extra)}`")


def module_of(distribution: str) -> str:
    """The module of a distribution that we require."""
    return _MODULES.get(distribution, distribution.replace("-", "_"))
