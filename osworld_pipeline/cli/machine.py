"""The option --json of `osworld-pipeline`, and its command line with JSON errors."""

import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import click
import typer

from osworld_pipeline.programs.addresses import ready_message
from osworld_pipeline.programs.answers import FLAG, print_interrupt, print_json, print_usage_error

JsonOption = Annotated[bool, typer.Option(FLAG, help="Print the result or the error as JSON.")]
ServingJsonOption = Annotated[
    bool, typer.Option(FLAG, help="Print one line of JSON at the start: url, pid, ...; an error as JSON.")
]


def announce_successor(url: str) -> None:
    """Prints the line of --json for a server that replaces this process and keeps its process id. The server's output
    then goes to standard error."""
    print_json(ready_message(url), on_one_line=True)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())


def run_for_machine(app: Callable[..., Any]) -> int:
    """Runs the command line; returns the exit status. An error in the options, or an interrupt, is one object on
    standard error."""
    try:
        status = app(standalone_mode=False)
    except click.ClickException as error:
        return print_usage_error(error.format_message(), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return print_interrupt()
    return status if isinstance(status, int) else 0
