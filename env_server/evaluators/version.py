"""The version of the grader: it changes exactly when the code of a grader does."""

import ast
import hashlib
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

from osworld_pipeline import task_schema

SEMANTICS = "osworld-1.0.2"
"""The desktop-env release whose getters and metrics these follow."""
_OF_TASK_SCHEMA = ("context.py", "getters.py", "metrics/*.py", "reading.py")


def _digest_sources() -> str:
    digest, schema = hashlib.sha256(), Path(task_schema.__file__).parent
    paths = [*Path(__file__).parent.glob("*.py"), *(path for name in _OF_TASK_SCHEMA for path in schema.glob(name))]
    for path in sorted(paths, key=lambda path: path.parts[-2:]):
        digest.update(path.name.encode() + b"\0" + without_declarations(path.read_bytes()) + b"\0")
    return digest.hexdigest()


def without_declarations(source: bytes) -> bytes:
    """A module without the decorators, annotations and docstrings of its functions. They are the text of a page, and
    what is accepted in a task; no score depends on them."""
    lines = [0, *accumulate(map(len, source.splitlines(keepends=True)))]
    nodes = sorted(_declarations(ast.parse(source)), key=lambda node: (node.lineno, node.col_offset), reverse=True)
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


GRADER_VERSION = f"{SEMANTICS}+{_digest_sources()[:12]}"
