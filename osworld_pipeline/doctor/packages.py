"""Checks the Python packages of each extra: installed, importable by name, and of the tested version."""

import importlib.metadata
import importlib.util
import platform
import sys

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from osworld_pipeline.domain.finding import Finding, Status
from osworld_pipeline.domain.remedies import checkout, how_to_set_up, module_of
from osworld_pipeline.domain.version import DISTRIBUTION

SHOWN = 4


def check_python(name: str, version: str = platform.python_version()) -> Finding:
    """The distribution's metadata says which versions it supports."""
    text = f"Python {version} at {sys.executable}"
    required = importlib.metadata.metadata(DISTRIBUTION)["Requires-Python"]
    if SpecifierSet(required).contains(version, prereleases=True):
        return Finding(name=name, status=Status.OK, message=text)
    return Finding(
        name=name,
        status=Status.MISSING,
        message=f"{text}, but {required} is required",
        remedy=how_to_set_up("python"),
    )


def check_extra(name: str, extra: str) -> Finding:
    """Imports nothing and does not use the network."""
    wanted = requirements_of(extra)
    if not wanted:
        text = f"this installation has no extra named {extra}: it is older than these sources"
        return Finding(name=name, status=Status.MISSING, message=text, remedy=how_to_set_up(extra))
    lacks = [lack for requirement in wanted if (lack := _lack(requirement))]
    if lacks:
        more = f" and {len(lacks) - SHOWN} more" if len(lacks) > SHOWN else ""
        text = f"the extra {extra} is incomplete: {', '.join(lacks[:SHOWN])}{more}"
        return Finding(name=name, status=Status.MISSING, message=text, remedy=how_to_set_up(extra))
    pins = read_pins()
    others = [other for requirement in wanted if (other := _other_version(requirement, pins))]
    if others:
        text = (
            f"all packages of the extra {extra} are installed, but not the tested versions: {', '.join(others[:SHOWN])}"
        )
        return Finding(name=name, status=Status.WARN, message=text, remedy=how_to_set_up(extra))
    own = [item.name for item in wanted if item.marker is not None and "extra" in str(item.marker)]
    names = ", ".join(f"{item} {importlib.metadata.version(item)}" for item in own)
    text = f"all packages of the extra {extra} are installed: {names}"
    return Finding(name=name, status=Status.OK, message=text)


def requirements_of(extra: str) -> list[Requirement]:
    """The requirements of an extra, including the base requirements."""
    found = []
    for text in importlib.metadata.requires(DISTRIBUTION) or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or marker.evaluate({"extra": ""}) or marker.evaluate({"extra": extra}):
            found.append(requirement)
    is_known = extra in (importlib.metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or ())
    return found if is_known else []


def read_pins() -> dict[str, str]:
    """The versions in constraints.txt, by distribution; empty outside a checkout."""
    root = checkout()
    if root is None or not (root / "constraints.txt").is_file():
        return {}
    pins = {}
    for line in (root / "constraints.txt").read_text().splitlines():
        # A pin is followed by the hashes of its files, one per line.
        requirement = Requirement(line.removesuffix("\\")) if "==" in line and not line.startswith("#") else None
        if requirement is not None and (requirement.marker is None or requirement.marker.evaluate()):
            pins[requirement.name] = next(iter(requirement.specifier)).version
    return pins


def _lack(requirement: Requirement) -> str | None:
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return f"{requirement.name} is not installed"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{requirement.name} is {version} and not {requirement.specifier}"
    if importlib.util.find_spec(module_of(requirement.name)) is None:
        return f"{requirement.name} {version} has no module {module_of(requirement.name)}"
    return None


def _other_version(requirement: Requirement, pins: dict[str, str]) -> str | None:
    pin, version = pins.get(requirement.name), importlib.metadata.version(requirement.name)
    # A build for a CPU or a GPU has a suffix after a plus.
    return None if pin is None or version.partition("+")[0] == pin else f"{requirement.name} {version}, tested: {pin}"
