"""The installed version."""

import importlib.metadata

DISTRIBUTION = "osworld-pipeline"


def installed_version() -> str:
    """Empty if the distribution is not installed, as in a checkout that is only on the path."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return ""


def version_line(program: str) -> str:
    """The output of `PROGRAM --version`."""
    return f"{program} {installed_version() or '(not installed: no version)'}"
