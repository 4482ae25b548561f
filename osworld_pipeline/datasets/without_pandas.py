"""Arrow imports pandas, where there is one, only to ask whether a list is a series of its: half a second and 60 MB, for
a program that never has a series."""

import sys
from importlib.abc import MetaPathFinder


class _WithoutPandas(MetaPathFinder):
    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("this program has no use for pandas", name=fullname)


def forbid_pandas() -> None:
    """For the rest of this process; for programs whose whole work is known."""
    sys.meta_path.insert(0, _WithoutPandas())
