"""`fetch` and `import`: raw sources from a dataset hub, and external demonstrations."""

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from osworld_pipeline.cli.machine import JsonOption
from osworld_pipeline.cli.options import StateOption, writable_state
from osworld_pipeline.cli.progress import counter, shown_progress
from osworld_pipeline.programs.answers import print_json
from osworld_pipeline.progress import BYTES

if TYPE_CHECKING:
    from osworld_pipeline.datasets.hub import Fetched

SHOWN_REJECTS = 20


class Kind(StrEnum):
    OSWORLD_RESULTS = "osworld-results"
    AGENTNET = "agentnet"
    SLIME_REPLAY = "slime-replay"


_UNITS = {Kind.OSWORLD_RESULTS: "folders", Kind.AGENTNET: BYTES, Kind.SLIME_REPLAY: BYTES}


def register(app: typer.Typer) -> None:
    app.command()(fetch)
    app.command(name="import")(import_)


def fetch(
    requests: Annotated[list[str], typer.Argument(help="Each SOURCE=ORG/NAME, optionally with @REVISION and :FILE.")],
    hf_root: Annotated[Path | None, typer.Option(help="The datasets folder; default: the state's own.")] = None,
    state: StateOption = Path("var"),
    as_json: JsonOption = False,
) -> None:
    """Download raw sources from Hugging Face dataset ids, pinned in sources.lock.json."""
    from osworld_pipeline.datasets.hub import fetch_sources, parse_request
    from osworld_pipeline.domain.state import StateDir

    root = hf_root.resolve() if hf_root else StateDir(state.resolve()).datasets
    parsed = [parse_request(text) for text in requests]
    found: list[Fetched] = []
    try:
        with shown_progress("fetch", as_json=as_json) as on_progress:
            fetch_sources(parsed, root, on_fetched=found.append, on_progress=on_progress)
    finally:
        # Printed after the bar, which would break long lines; after a failure, the sources fetched before the failure.
        if not as_json:
            for each in found:
                _print_fetched(each)
    if as_json:
        print_json([asdict(each) for each in found])


def _print_fetched(fetched: "Fetched") -> None:
    lock = fetched.lock
    how = "already present" if fetched.was_there else "fetched"
    print(
        f"{lock.source}: {how}, {lock.repo_id}@{lock.revision[:12]}, {lock.num_bytes:,} bytes, "
        f"licence {lock.licence or 'unknown'}: {fetched.path}"
    )


def import_(
    kind: Annotated[Kind, typer.Argument(help="The format of the import.")],
    path: Annotated[Path, typer.Argument(help="The JSONL file, or the folder.")],
    name: Annotated[
        str, typer.Option(help="Name of the import and its rows' source: lower-case letters, digits and _.")
    ],
    licence: Annotated[str, typer.Option(help="Licence of the data; stored in every row.")],
    revision: Annotated[str, typer.Option(help="Revision of the origin: a commit, a date, a version.")] = "",
    quality_rank: Annotated[
        int, typer.Option(help="Of two equal demonstrations the one with the higher rank is kept.")
    ] = -1,
    images: Annotated[
        Path | None, typer.Option(help="agentnet: the screenshots; default: images/ next to the file.")
    ] = None,
    osworld_path: Annotated[
        Path | None, typer.Option(help="osworld-results: the OSWorld checkout; default: the state's own tree.")
    ] = None,
    evaluations: Annotated[
        bool, typer.Option("--evaluations", help="osworld-results: as rows of `evals`, not for training.")
    ] = False,
    state: StateOption = Path("var"),
    as_json: JsonOption = False,
) -> None:
    """Import external demonstrations or evaluations. A second import with the same name replaces the first."""
    from osworld_pipeline.datasets.importers import ImportOptions
    from osworld_pipeline.datasets.importers.agentnet import import_agentnet
    from osworld_pipeline.datasets.importers.osworld_results import import_osworld_results
    from osworld_pipeline.datasets.importers.slime_replay import import_slime_replay
    from osworld_pipeline.tables.catalog import rebuild_catalog

    if evaluations and kind is not Kind.OSWORLD_RESULTS:
        raise typer.BadParameter(f"--evaluations is only for {Kind.OSWORLD_RESULTS}: {kind} has no grader's scores")
    place = writable_state(state, must_exist=False)
    options = ImportOptions(name=name, licence=licence, revision=revision, quality_rank=quality_rank)
    with shown_progress(f"import {kind}", as_json=as_json) as show:
        on_progress = counter(show, f"reading {path.name}", _UNITS[kind])
        if kind is Kind.AGENTNET:
            summary = import_agentnet(place, path, options, images=images, on_progress=on_progress)
        elif kind is Kind.OSWORLD_RESULTS:
            summary = import_osworld_results(
                place,
                path,
                options,
                osworld_path=osworld_path,
                as_evaluations=evaluations,
                on_progress=on_progress,
            )
        else:
            summary = import_slime_replay(place, path, options, on_progress=on_progress)
    if summary.num_episodes:
        rebuild_catalog(place)
    folder = place.imports / name
    if as_json:
        print_json({"folder": folder, **asdict(summary)})
        return
    _print_rejects(folder)
    kinds = ", ".join(f"{count} {kind}" for kind, count in summary.num_rejects_by_kind.items())
    print(
        f"{summary.num_demonstrations} demonstrations, {summary.num_episodes} episodes, {summary.num_tasks} tasks, "
        f"{summary.num_rejects} rejects{f' ({kinds})' if kinds else ''}: {folder}"
    )


def _print_rejects(folder: Path) -> None:
    import orjson

    from osworld_pipeline.datasets.imports import REJECTS

    console = Console()
    with (folder / REJECTS).open("rb") as file:
        for number, line in enumerate(file):
            if number == SHOWN_REJECTS:
                console.print(f"and more in {folder / REJECTS}", highlight=False, markup=False, soft_wrap=True)
                break
            reject = orjson.loads(line)
            text = f"not used: {reject['path']}:{reject['line']}: {reject['reason']}"
            console.print(text, highlight=False, markup=False, soft_wrap=True)
