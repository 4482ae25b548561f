"""The version of a part of our code: a digest of its source files, stored with its output."""

import hashlib
import importlib.util
from functools import cache
from pathlib import Path


@cache
def code_version(*names: str) -> str:
    """Twelve hexadecimal digits over the sources of these modules and packages (without subpackages). Modules are
    located but not imported."""
    digest = hashlib.sha256()
    for name in sorted(names):
        spec = importlib.util.find_spec(name)
        assert spec is not None, f"there is no module {name}"
        folders = spec.submodule_search_locations
        paths = [Path(spec.origin)] if folders is None and spec.origin else []
        for folder in folders or ():
            paths += Path(folder).glob("*.py")
        for path in sorted(paths):
            digest.update(f"{name}\0{path.name}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
