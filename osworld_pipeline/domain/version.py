"""The installed version, and the message for files of a newer one."""

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


def newer_format(what: str, number: int, *, known: int, needs: str) -> str:
    """A sentence for files of a format above the last one `known`. `needs`: the version that reads it, if recorded."""
    wanted = f"version {needs} or newer" if needs else "the version that wrote it, or a newer one"
    return f"{what} of format {number}, and this version reads formats up to {known}: install {wanted}"
