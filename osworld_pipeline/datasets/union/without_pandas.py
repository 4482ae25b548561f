"""Arrow imports an installed pandas only to check whether a list is a pandas Series. That costs half a second and 60 MB
in a program that has no Series."""

import sys
from importlib.abc import MetaPathFinder


class _WithoutPandas(MetaPathFinder):
    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("this program does not use pandas", name=fullname)


def forbid_pandas() -> None:
    """Blocks the import for the rest of this process; only for programs that never need pandas."""
    sys.meta_path.insert(0, _WithoutPandas())
