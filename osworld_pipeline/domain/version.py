"""The version of what is installed."""

import importlib.metadata

DISTRIBUTION = "osworld-pipeline"


def installed_version() -> str:
    """Empty where the distribution is not installed, as in a checkout that only lies on the path."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return ""


def version_line(program: str) -> str:
    """What `PROGRAM --version` prints."""
    return f"{program} {installed_version() or '(not installed: no version)'}"
