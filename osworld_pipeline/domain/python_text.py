"""Python's own parser on text of a model, a task or a recording."""

import ast
import warnings
from threading import Lock
from typing import Any, Literal, overload

_MAX_TRIES = 20
_parsing = Lock()


@overload
def parse_python(text: str) -> ast.Module: ...
@overload
def parse_python(text: str, mode: Literal["eval"]) -> ast.Expression: ...
def parse_python(text: str, mode: Literal["exec", "eval"] = "exec") -> ast.Module | ast.Expression:
    """The tree of a text.

    Before 3.11.9 and 3.12.3 Python raises SystemError for a valid text if another thread parses at the same time
    (CPython issue 106905). A lock therefore serialises our calls, and a parse that fails because another library parses
    at the same time is repeated.

    Raises:
        ValueError: it is not Python, or it is nested too deep.
    """
    cause: SystemError | None = None
    for _ in range(_MAX_TRIES):
        try:
            with _parsing, warnings.catch_warnings():
                # A model's "C:\dir" is a string with a backslash; suppress the warning.
                warnings.simplefilter("ignore")
                tree: Any = ast.parse(text, mode=mode)
                return tree
        except SystemError as error:
            cause = error
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            reason = error.msg if isinstance(error, SyntaxError) else str(error)
            raise ValueError(reason or type(error).__name__) from error
    raise ValueError(f"Python's parser failed {_MAX_TRIES} times") from cause
