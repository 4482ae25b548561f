"""`tasks`: train and test splits of an OSWorld tree."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from osworld_pipeline.cli.machine import JsonOption
from osworld_pipeline.programs.answers import print_json

SHOWN_REJECTS = 20


def register(app: typer.Typer) -> None:
    app.command()(tasks)


def tasks(
    osworld_path: Annotated[Path, typer.Option(help="An OSWorld checkout.")],
    output_dir: Annotated[Path, typer.Option(help="Folder for the splits.")],
    domains: Annotated[str, typer.Option(help="Comma-separated; default: all.")] = "",
    test_ratio: Annotated[float, typer.Option(help="Approximate share of the test split, decided by hash.")] = 0.2,
    seed: Annotated[int, typer.Option(help="Seed of the split.")] = 42,
    as_json: JsonOption = False,
) -> None:
    """Split an OSWorld tree into train.parquet and test.parquet, stable by task id."""
    from osworld_pipeline.datasets.task_split import split_tasks, write_split

    names = [name.strip().strip("/") for name in domains.split(",") if name.strip()]
    split = split_tasks(osworld_path.resolve(), domains=names, test_ratio=test_ratio, seed=seed)
    write_split(split, output_dir.resolve())
    counts = {
        domain: {
            "train": sum(task.domain == domain for task in split.train),
            "test": sum(task.domain == domain for task in split.test),
        }
        for domain in split.domains
    }
    if as_json:
        rejects = [{"path": reject.path, "reason": reject.reason} for reject in split.rejects]
        print_json(
            {
                "output_dir": output_dir,
                "num_train": len(split.train),
                "num_test": len(split.test),
                "domains": counts,
                "rejects": rejects,
            }
        )
        return
    console = Console()
    table = Table("domain", "train", "test")
    for domain, each in counts.items():
        table.add_row(domain, str(each["train"]), str(each["test"]))
    table.add_row("all", str(len(split.train)), str(len(split.test)), style="bold")
    console.print(table)
    for reject in split.rejects[:SHOWN_REJECTS]:
        console.print(f"not used: {reject.path}: {reject.reason}", highlight=False, markup=False, soft_wrap=True)
    print(
        f"{len(split.train)} train and {len(split.test)} test tasks, {len(split.rejects)} files not used: {output_dir}"
    )
