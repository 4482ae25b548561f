"""Machine-readable output: with --json a result is JSON on standard output, and an error is JSON on standard error."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import click
import orjson
import typer

FLAG = "--json"
JsonOption = Annotated[bool, typer.Option(FLAG, help="Print the result or the error as JSON.")]


def print_json(answer: Any) -> None:
    """Prints one JSON value to standard output; dataclasses as objects, paths as text, NaN and infinities as null."""
    options = orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
    sys.stdout.buffer.write(orjson.dumps(answer, default=_plain, option=options) + b"\n")
    sys.stdout.flush()


def wants_json(arguments: Sequence[str]) -> bool:
    """Whether --json is among the options; arguments after `--` are not options."""
    return FLAG in arguments[: arguments.index("--") if "--" in arguments else len(arguments)]


def run_for_machine(app: Callable[..., Any]) -> int:
    """Runs the command line; returns the exit status. An error in the options, or an interrupt, is one object on
    standard error."""
    try:
        status = app(standalone_mode=False)
    except click.ClickException as error:
        return print_error("UsageError", error.format_message(), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return print_error("Interrupted", "interrupted from the keyboard", 130)
    return status if isinstance(status, int) else 0


def print_error(kind: str, message: str, status: int) -> int:
    """Prints an error as one object to standard error: type, message, exit status. Returns the status."""
    error = {"type": kind, "message": message, "exit_status": status}
    sys.stderr.write(orjson.dumps({"error": error}).decode() + "\n")
    return status


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
