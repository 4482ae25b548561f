"""`osworld-pipeline`: the pipeline from the command line. Each module adds its commands; heavy imports wait in them."""

import sys

import typer
from rich.console import Console
from rich.markup import escape

from osworld_pipeline.cli import exports, imports, pipeline, store, tasks, union
from osworld_pipeline.errors import PipelineError

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
for module in (pipeline, tasks, union, imports, exports, store):
    module.register(app)


def main() -> None:
    """Runs the command line; an error of ours is one sentence and status 1."""
    try:
        app()
    except PipelineError as error:
        text = f"[bold red]{type(error).__name__}[/]: {escape(str(error))}"
        Console(stderr=True).print(text, highlight=False, markup=True)
        sys.exit(1)
