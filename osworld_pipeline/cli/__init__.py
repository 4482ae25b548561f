"""`osworld-pipeline`: the pipeline from the command line. Each module adds its commands; heavy imports are inside the
commands."""

import inspect
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Annotated, NoReturn

import typer

from osworld_pipeline.cli import (
    backfill,
    checkpoints,
    collect,
    demonstrate,
    doctor,
    evaluate,
    project,
    query,
    report,
    setup,
    train,
    view,
)
from osworld_pipeline.cli.data import exports, imports, lineage, migrate, publish, remote, store, tasks, union
from osworld_pipeline.cli.machine import JsonOption, run_for_machine
from osworld_pipeline.cli.overview import show_overview
from osworld_pipeline.cli.shown import say
from osworld_pipeline.domain.top_level_names import shadow_sentence, use_own_packages
from osworld_pipeline.domain.version import version_line
from osworld_pipeline.programs.answers import FLAG
from osworld_pipeline.programs.failures import DEBUG, Asked, fail, without_debug
from osworld_pipeline.programs.short_process import collect_seldom, run_process

# Click itself suggests similar commands; typer would repeat it.
app = typer.Typer(invoke_without_command=True, pretty_exceptions_enable=False, suggest_commands=False)
COMMANDS: Mapping[str, tuple[ModuleType, ...]] = {
    "Set up": (project, setup, doctor),
    "Train and evaluate": (train, evaluate, backfill, collect, checkpoints),
    "Look at results": (report, view, query, lineage),
    "Data": (tasks, union, imports, demonstrate, exports, publish),
    "Store": (store, migrate, remote),
}
"""Modules with commands, by their heading in the help text."""
_LINE_BREAK = re.compile(r"(?<!\n)\n(?!\n)")


def _register() -> None:
    for heading, modules in COMMANDS.items():
        for module in modules:
            known = len(app.registered_commands), len(app.registered_groups)
            module.register(app)
            for added in (*app.registered_commands[known[0] :], *app.registered_groups[known[1] :]):
                added.rich_help_panel = heading
    _join_lines(app)


def _join_lines(group: typer.Typer) -> None:
    """Joins the lines of each paragraph of the commands' docstrings, which Typer's list of commands does not."""
    for command in group.registered_commands:
        if command.help is None and command.callback is not None:
            command.help = _LINE_BREAK.sub(" ", inspect.getdoc(command.callback) or "")
    for inner in group.registered_groups:
        if inner.typer_instance is not None:
            _join_lines(inner.typer_instance)


_register()


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(version_line("osworld-pipeline"))
        raise typer.Exit


@app.callback(help="Train and evaluate agents that use a computer: from raw data to reliable scores.")
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option(DEBUG, help="Print the traceback of an error. May also follow the command's name.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    if context.invoked_subcommand is None:
        show_overview(Path.cwd(), as_json=as_json)
    elif as_json:
        raise typer.BadParameter("it belongs after the command's name", param_hint=FLAG)


def run() -> NoReturn:
    """The installed command."""
    collect_seldom()
    run_process(main)


def main() -> None:
    """Runs the command line. An error is one sentence, or a JSON object with --json, and status 1; a wrong option has
    status 2."""
    asked = Asked.of(sys.argv[1:])
    sys.argv[1:] = without_debug(sys.argv[1:])
    try:
        if sentence := shadow_sentence(Path.cwd()):
            say(f"note: {sentence}", as_json=asked.as_json)
        use_own_packages()
        if asked.as_json:
            sys.exit(run_for_machine(app))
        app()
    except Exception as error:  # noqa: BLE001 - shown as a defect, with its traceback in a file
        sys.exit(fail(error, asked))
