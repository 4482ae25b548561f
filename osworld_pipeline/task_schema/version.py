"""The version of getters and metrics: a digest of their code."""

import ast
import hashlib
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

from osworld_pipeline.domain.python_text import parse_python

_SOURCES = ("context.py", "getters.py", "metrics/*.py", "reading.py")


def code_digest() -> str:
    """A digest of the modules that read evaluators, read state or compare it, each after `without_declarations`."""
    digest = hashlib.sha256()
    for path in digested_files():
        digest.update(path.name.encode() + b"\0" + without_declarations(path.read_bytes()) + b"\0")
    return digest.hexdigest()


def digested_files() -> list[Path]:
    return sorted(path for pattern in _SOURCES for path in Path(__file__).parent.glob(pattern))


def without_declarations(source: bytes) -> bytes:
    """A module without the decorators, annotations and docstrings of its functions. These only define the text of
    docs/evaluators.md and what a task may contain; no score depends on them."""
    lines = [0, *accumulate(map(len, source.splitlines(keepends=True)))]
    nodes = sorted(
        _declarations(parse_python(source.decode())), key=lambda node: (node.lineno, node.col_offset), reverse=True
    )
    for node in nodes:
        end = lines[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        source = source[: lines[node.lineno - 1] + node.col_offset] + source[end:]
    return source


def _declarations(tree: ast.Module) -> Iterator[ast.expr | ast.stmt]:
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation is not None:
            yield node.annotation
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from node.decorator_list
            if ast.get_docstring(node) is not None:
                yield node.body[0]
