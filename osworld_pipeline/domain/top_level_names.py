"""The top-level names of this distribution. `assets`, `resources` and `jobs` are frequent names: a folder of the user
may have packages of the same names, and Python and Dagster put the working directory first on the search path."""

import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

from osworld_pipeline.domain.version import DISTRIBUTION
from osworld_pipeline.errors import DependencyError

PACKAGES = ("osworld_pipeline", "assets", "resources", "jobs", "env_server")
ROOT = Path(__file__).resolve().parents[2]
"""The folder with our packages: site-packages, or a checkout."""


def shadowing(folder: Path, *, root: Path = ROOT) -> list[Path]:
    """Packages and modules in `folder` with names of ours. A folder without `__init__.py` shadows no package."""
    return list(_shadowing(folder)) if folder.resolve() != root else []


def _shadowing(folder: Path) -> Iterator[Path]:
    for name in PACKAGES:
        for path in (folder / name / "__init__.py", folder / f"{name}.py"):
            if path.is_file():
                yield path


def shadow_sentence(folder: Path, *, root: Path = ROOT) -> str:
    """What in `folder` has names of ours, in one sentence; empty if nothing does."""
    found = shadowing(folder, root=root)
    if not found:
        return ""
    files = " and ".join(str(path.relative_to(folder)) for path in found)
    verb = "shadows" if len(found) == 1 else "shadow"
    return (
        f"{files} in {folder} {verb} what {DISTRIBUTION} installs under the same name: its commands and its "
        "workspace use the installed one, and other Python programs that are started in this folder import yours"
    )


def python_module(name: str) -> list[str]:
    """The command of one of our modules as a program. If the working directory has packages with the same names, `-P`
    excludes it from Python's search path."""
    return [sys.executable, *(["-P"] if shadowing(Path.cwd()) else []), "-m", name]


def use_own_packages() -> None:
    """Imports our packages by their location, if the search path has others of their names first.

    Raises:
        DependencyError: another package of such a name is already imported.
    """
    for name in PACKAGES:
        if name in sys.modules:
            _need_own(name)
            continue
        found = PathFinder.find_spec(name)
        if found is None or _is_own(name, found.origin):
            continue
        spec = PathFinder.find_spec(name, [str(ROOT)])
        if spec is None or spec.loader is None:
            continue  # not installed
        module = sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(module)


def _need_own(name: str) -> None:
    origin = getattr(sys.modules[name], "__file__", None)
    if not _is_own(name, origin):
        raise DependencyError(
            f"{origin or name} is imported as {name}, which is also a package of {DISTRIBUTION} in {ROOT}: rename it"
        )


def _is_own(name: str, origin: str | None) -> bool:
    return origin is not None and Path(origin).resolve().is_relative_to(ROOT / name)
