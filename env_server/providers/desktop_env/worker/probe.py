"""Lists the features of an installed desktop-env without importing it: read from its sources in a tenth of a second."""

import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path

PORTS = {"chromium_port", "vlc_port"}
"""Attributes of DesktopEnv with the ports of programs inside the desktop, other than the guest agent."""


def main() -> None:
    """Arguments: the last folders of the module path. Prints one JSON object, or null if there is no desktop-env."""
    sys.path += sys.argv[1:]
    spec = importlib.util.find_spec("desktop_env")
    if spec is None or not spec.submodule_search_locations:
        print("null")
        return
    root = Path(next(iter(spec.submodule_search_locations)))
    functions = _functions(root / "evaluators" / "getters")
    names = _names(root / "evaluators" / "getters" / "__init__.py")
    print(
        json.dumps(
            {
                "version": _version(),
                "digest": _digest(root),
                "metrics": sorted(_names(root / "evaluators" / "metrics" / "__init__.py")),
                "getters": sorted(name[4:] for name in names if name.startswith("get_")),
                "port_getters": sorted(
                    name[4:] for name in names if name.startswith("get_") and _needs_port(name, functions)
                ),
                "verbs": _verbs(root / "controllers" / "setup.py"),
                "folders": [sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parents[1]), str(root)],
            }
        )
    )


def _version() -> str:
    try:
        return importlib.metadata.version("desktop-env")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _digest(root: Path) -> str:
    """Digest of the sources that compute scores: evaluators, controllers, and the environment that combines them."""
    digest = hashlib.sha256()
    for path in sorted([*root.glob("evaluators/**/*.py"), *root.glob("controllers/*.py"), root / "desktop_env.py"]):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _names(path: Path) -> set[str]:
    """Names in a package's __init__: imported or defined there."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef):
            found.add(node.name)
    return found


def _functions(folder: Path) -> dict[str, set[str]]:
    """Every name and attribute in the body of each function, by function."""
    found: dict[str, set[str]] = {}
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                mentioned = found.setdefault(node.name, set())
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Attribute):
                        mentioned.add(inner.attr)
                    elif isinstance(inner, ast.Name):
                        mentioned.add(inner.id)
    return found


def _needs_port(name: str, functions: dict[str, set[str]]) -> bool:
    seen, frontier = set[str](), {name}
    while frontier:
        current = frontier.pop()
        seen.add(current)
        mentioned = functions.get(current, set())
        if mentioned & PORTS:
            return True
        frontier |= (mentioned & functions.keys()) - seen
    return False


def _verbs(path: Path) -> list[str]:
    """Set-up verbs that are implemented."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("_") and node.name.endswith("_setup"):
            first = next((statement for statement in node.body if not isinstance(statement, ast.Expr)), None)
            if not (isinstance(first, ast.Raise) and "NotImplementedError" in ast.dump(first)):
                found.append(node.name[1:-6])
    return sorted(found)


if __name__ == "__main__":
    main()
