"""`union`: Slime-OSWorld's union datasets from the raw sources, equal to those of its own script."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from osworld_pipeline.cli.machine import JsonOption
from osworld_pipeline.cli.progress import shown_progress
from osworld_pipeline.programs.answers import print_json
from osworld_pipeline.progress import BYTES, Progress

if TYPE_CHECKING:
    from osworld_pipeline.datasets.union.build import UnionSummary
    from osworld_pipeline.datasets.union.replay import OnProgress

MAX_PROMPT_BYTES = 2**20


def register(app: typer.Typer) -> None:
    app.command()(union)


def union(
    hf_root: Annotated[Path, typer.Option(help="The folder with osworld_datasets/ and osworld-merged-replay/.")],
    osworld_repo: Annotated[Path, typer.Option(help="An OSWorld checkout, for task configs.")],
    output_dir: Annotated[Path, typer.Option(help="Folder for the five files, each written atomically.")],
    system_prompt: Annotated[
        str, typer.Option(help="full, short, or a file with the text that replaces the system turn.")
    ] = "full",
    with_tree_tasks: Annotated[
        bool, typer.Option("--with-tree-tasks", help="Include tasks that only the OSWorld checkout has.")
    ] = False,
    dialect: Annotated[str, typer.Option(help="Dialect of the assistant turns.")] = "slime",
    workers: Annotated[int, typer.Option(min=-1, help="Additional processes; -1: one per core, at most 4.")] = -1,
    max_line_mib: Annotated[int, typer.Option(min=1, help="Longer lines are listed as rejects.")] = 128,
    as_json: JsonOption = False,
) -> None:
    """Merge the raw sources into task tables, one replay file, its statistics, and a list of rejects."""
    from osworld_pipeline.datasets.artefacts import REJECTS_FILE, write_union_artefacts
    from osworld_pipeline.without_pandas import spare_pandas

    spare_pandas()
    console = Console(stderr=True)
    prompt = _prompt(system_prompt, dialect)
    with _progress(as_json) as on_progress:
        summary = write_union_artefacts(
            hf_root.resolve(),
            osworld_repo.resolve(),
            output_dir.resolve(),
            system_prompt=prompt,
            dialect=dialect,
            with_tree_tasks=with_tree_tasks,
            on_progress=on_progress,
            num_workers=None if workers < 0 else workers,
            max_line_bytes=max_line_mib * 2**20,
        )
    if as_json:
        print_json({"output_dir": output_dir, **asdict(summary)})
        return
    _print_summary(summary, output_dir, console, REJECTS_FILE)


def _prompt(name: str, dialect: str) -> str:
    from osworld_pipeline.dialects import load_dialect
    from osworld_pipeline.errors import DatasetError

    try:
        reader = load_dialect(dialect)
    except ValueError as error:
        raise DatasetError(f"--dialect: {error}") from error
    if name in ("full", "short"):
        return reader.system_prompt(name)
    path = Path(name)
    try:
        if path.stat().st_size > MAX_PROMPT_BYTES:
            raise DatasetError(f"the system prompt {path} is larger than {MAX_PROMPT_BYTES // 2**20} MiB")
        # Keep the line ends: the text is compared exactly.
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or "it is not UTF-8"
        raise DatasetError(
            f"cannot read the system prompt {name}: {why}; --system-prompt must be full, short, or a text file"
        ) from error


@contextmanager
def _progress(as_json: bool) -> Iterator["OnProgress | None"]:
    """Over the bytes of all demonstrations."""
    with shown_progress("union", as_json=as_json) as show:
        yield None if show is None else lambda source, done, total: show(Progress(source, done, total, BYTES))


def _print_summary(summary: "UnionSummary", output_dir: Path, console: Console, rejects_file: str) -> None:
    import json

    for name in summary.absent:
        console.print(f"missing, skipped: {name}", highlight=False)
    for name in (*summary.num_rows, "osworld_train_stats.json"):
        print(f"wrote {output_dir / name}")
    print(json.dumps(dict(summary.stats), indent=2))
    print(f"duplicates left out: {summary.num_duplicates}")
    rejects = ", ".join(f"{kind} {count}" for kind, count in sorted(summary.num_rejects.items()))
    print(f"rejects: {rejects or 'none'}" + (f" (file, line and reason in {rejects_file})" if rejects else ""))
