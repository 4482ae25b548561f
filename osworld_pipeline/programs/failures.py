"""How a program fails: one sentence on standard error, or one JSON object with --json. The traceback of a defect is
written to a file; --debug prints it."""

import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape

from osworld_pipeline.domain.remedies import missing_package
from osworld_pipeline.domain.shown_commands import PIPELINE
from osworld_pipeline.errors import InternalError, PipelineError
from osworld_pipeline.programs.answers import print_error, print_interrupt, wants_json

DEBUG = "--debug"


class Asked(NamedTuple):
    """The options that all commands have."""

    as_json: bool
    debug: bool

    @classmethod
    def of(cls, arguments: Sequence[str]) -> "Asked":
        """Arguments after `--` are not options."""
        options = arguments[: arguments.index("--") if "--" in arguments else len(arguments)]
        return cls(as_json=wants_json(arguments), debug=DEBUG in options)


def without_debug(arguments: Sequence[str]) -> list[str]:
    """The arguments without --debug, which may be anywhere among the options."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return [word for word in arguments[:end] if word != DEBUG] + list(arguments[end:])


def run_server_program(program: str, run: Callable[[list[str]], int], arguments: Sequence[str]) -> int:
    """Runs a program of a server, or one of its commands; returns its exit status. `run` gets the arguments without
    --debug."""
    asked = Asked.of(arguments)
    try:
        return run(without_debug(arguments))
    except KeyboardInterrupt:
        return print_interrupt() if asked.as_json else 130
    except Exception as error:  # noqa: BLE001 - shown as a defect, with its traceback in a file
        return fail(error, asked, program=program)


def fail(error: Exception, asked: Asked, *, program: str = "") -> int:
    """Prints why a command failed; returns its exit status. `program`: what the sentence begins with; default: the
    class of the error."""
    if asked.debug:
        traceback.print_exception(error)
    explained = _explain(error, asked, program or PIPELINE)
    if asked.as_json:
        return print_error(type(explained).__name__, str(explained), 1)
    text = f"[bold red]{program or type(explained).__name__}[/]: {escape(str(explained))}"
    # Not wrapped: a command in it can be pasted, and a caret points into the line above.
    Console(stderr=True).print(text, highlight=False, markup=True, soft_wrap=True)
    return 1


def _explain(error: Exception, asked: Asked, program: str) -> PipelineError:
    if isinstance(error, PipelineError):
        return error
    if isinstance(error, ModuleNotFoundError) and (explained := missing_package(error.name or "")):
        return explained
    where = "its traceback is above" if asked.debug else f"its traceback is in {_written_traceback(error, program)}"
    return InternalError(f"a defect of this program: {type(error).__name__}: {error}; {where}")


def _written_traceback(error: Exception, program: str) -> str:
    with tempfile.NamedTemporaryFile(
        "w", prefix=f"{program}-", suffix=".traceback", delete=False, encoding="utf-8"
    ) as file:
        file.writelines(traceback.format_exception(error))
        file.write(f"command: {sys.argv}\n")
    return file.name
