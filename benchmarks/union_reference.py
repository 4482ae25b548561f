"""Run Slime-OSWorld's union script unchanged from a checkout: `python union_reference.py CHECKOUT SCRIPT-OPTIONS...`.

The script imports two names from packages that need a GPU; they are stubs here.
"""

import runpy
import sys
import types
from pathlib import Path


def main(checkout: Path, options: list[str]) -> None:
    package = types.ModuleType("slime_osworld")
    package.__path__ = [str(checkout / "slime_osworld")]  # its __init__ imports the training code
    sys.modules["slime_osworld"] = package
    for name in ("slime", "slime.utils", "slime.utils.types"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["slime.utils.types"].Sample = type("Sample", (), {})  # type: ignore[attr-defined]
    script = checkout / "tools" / "build_union_datasets.py"
    sys.argv = [str(script), *options]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
