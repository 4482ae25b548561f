"""Keeps Arrow from importing pandas. With its first conversion of a Python value Arrow imports an installed pandas,
only to recognise objects of pandas; that takes half a second and 60 MB in every program."""

import sys
from importlib.abc import MetaPathFinder


class _Hidden(MetaPathFinder):
    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("pandas is hidden while Arrow looks for it", name=fullname)


def spare_pandas() -> None:
    """Lets Arrow look for pandas now, in vain. A program that imports pandas later can use it with Arrow as usual."""
    if "pandas" in sys.modules:
        return
    import pyarrow as pa

    hidden = _Hidden()
    sys.meta_path.insert(0, hidden)
    try:
        pa.array([None])
    finally:
        sys.meta_path.remove(hidden)
