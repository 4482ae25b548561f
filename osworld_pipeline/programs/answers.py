"""Machine-readable output: with --json a result is JSON on standard output, and an error is JSON on standard error."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import orjson

FLAG = "--json"


def print_json(answer: Any, *, on_one_line: bool = False) -> None:
    """Prints one JSON value to standard output; dataclasses as objects, paths as text, NaN and infinities as null."""
    options = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY | (0 if on_one_line else orjson.OPT_INDENT_2)
    sys.stdout.buffer.write(orjson.dumps(answer, default=_plain, option=options) + b"\n")
    sys.stdout.flush()


def wants_json(arguments: Sequence[str]) -> bool:
    """Whether --json is among the options; arguments after `--` are not options."""
    return FLAG in arguments[: arguments.index("--") if "--" in arguments else len(arguments)]


def print_error(kind: str, message: str, status: int) -> int:
    """Prints an error as one object to standard error: type, message, exit status. Returns the status."""
    error = {"type": kind, "message": message, "exit_status": status}
    sys.stderr.write(orjson.dumps({"error": error}).decode() + "\n")
    return status


def print_usage_error(message: str, status: int = 2) -> int:
    return print_error("UsageError", message, status)


def print_interrupt() -> int:
    return print_error("Interrupted", "interrupted from the keyboard", 130)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} cannot be converted to JSON")
