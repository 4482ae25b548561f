"""Tests that a page of docs/ names, and whether they exist."""

import ast
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parent


def named_in(text: str) -> list[tuple[str, str]]:
    """(file below tests/, name) of each test that the text names."""
    return [(file, name) for file, name in re.findall(r"`([\w/]+\.py)::(\w+)`", text)]


def missing_of(named: Iterable[tuple[str, str]]) -> list[str]:
    """The named tests that do not exist."""
    return [
        f"{file}::{name}" for file, name in sorted(named) if not (TESTS / file).is_file() or name not in _names_in(file)
    ]


@cache
def _names_in(file: str) -> frozenset[str]:
    """Read without importing the file, because its imports may not be installed."""
    tree = ast.parse((TESTS / file).read_text())
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(node.name for node in functions if node.name.startswith("test_"))
