"""`osworld-pipeline`: the pipeline from the command line. Each module adds its commands; heavy imports are inside the
commands."""

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from osworld_pipeline.cli import (
    backfill,
    checkpoints,
    collect,
    doctor,
    evaluate,
    pipeline,
    project,
    report,
    setup,
    train,
    view,
)
from osworld_pipeline.cli.data import exports, imports, lineage, publish, remote, store, tasks, union
from osworld_pipeline.cli.machine import run_for_machine, wants_json
from osworld_pipeline.cli.overview import show_overview
from osworld_pipeline.cli.shown import say
from osworld_pipeline.domain.remedies import missing_package
from osworld_pipeline.domain.top_level_names import shadow_sentence, use_own_packages
from osworld_pipeline.domain.version import version_line
from osworld_pipeline.errors import PipelineError

# Click itself suggests similar commands; typer would repeat it.
app = typer.Typer(
    invoke_without_command=True, add_completion=False, pretty_exceptions_enable=False, suggest_commands=False
)
COMMANDS = (
    project, setup, train, pipeline, evaluate, backfill, collect, report, view, checkpoints, doctor, tasks, union,
    imports, exports, publish, lineage, store, remote,
)  # fmt: skip
for module in COMMANDS:
    module.register(app)


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
) -> None:
    if context.invoked_subcommand is None:
        show_overview(Path.cwd())


def main() -> None:
    """Runs the command line. An error of ours is one sentence and status 1, or a JSON object with --json."""
    is_for_machine = wants_json(sys.argv[1:])
    try:
        if sentence := shadow_sentence(Path.cwd()):
            say(f"note: {sentence}", as_json=is_for_machine)
        use_own_packages()
        if is_for_machine:
            sys.exit(run_for_machine(app))
        app()
    except PipelineError as error:
        _fail(error)
    except ModuleNotFoundError as error:
        explained = missing_package(error.name or "")
        if explained is None:
            raise
        _fail(explained)


def _fail(error: PipelineError) -> NoReturn:
    text = f"[bold red]{type(error).__name__}[/]: {escape(str(error))}"
    # Not wrapped: a command in it can be pasted, and a caret points into the line above.
    Console(stderr=True).print(text, highlight=False, markup=True, soft_wrap=True)
    sys.exit(1)
