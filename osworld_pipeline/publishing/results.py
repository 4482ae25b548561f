"""Results of evaluations to publish: the files that `evaluate --output` wrote."""

import json
from pathlib import Path
from typing import Any

from osworld_pipeline.domain.shown_commands import PIPELINE, shell_line
from osworld_pipeline.errors import DatasetError
from osworld_pipeline.publishing.publication import (
    LicensedRows,
    Publication,
    PublishedFile,
    markdown_table,
    need_licence,
)

FOLDER = "results"


def plan_results(target: Path, *, licence: str | None) -> Publication:
    """`target` is a result file, or a folder of them.

    Raises:
        DatasetError: there is none, one cannot be read, or no licence is named.
    """
    paths = sorted(target.glob("*.json")) if target.is_dir() else [target]
    if not paths:
        raise DatasetError(f"{target} has no result file: {_way_out(target / 'result.json')}")
    own = need_licence(licence, of=str(target))
    found = [_read(path) for path in paths]
    rows = [
        (
            result["checkpoint"],
            f"{result['suite']['name']} ({result['suite']['digest'][:12]})",
            "unknown" if result["success_rate"] is None else f"{result['success_rate']:.1%}",
            _interval(result),
            f"{result['num_success']}/{result['num_valid']}",
            result["num_faults"],
            result["max_turns"],
            ", ".join(map(str, result["seeds"])),
            result["desktops"],
        )
        for result in found
    ]
    head = ("checkpoint", "suite", "success", "interval", "n", "faults", "turns", "seeds", "desktops")
    return Publication(
        repo_type="dataset",
        kind="results",
        title="Evaluations of desktop agents",
        licence=own,
        licences=tuple(
            LicensedRows(what=path.name, source=result["checkpoint"], licence=own, rows=len(result["results"]))
            for path, result in zip(paths, found, strict=True)
        ),
        files=tuple(PublishedFile.of(f"{FOLDER}/{path.name}", path) for path in paths),
        facts={
            "evaluations": [
                {name: result[name] for name in ("checkpoint", "suite", "stage_key", "success_rate", "interval")}
                for result in found
            ]
        },
        front_matter={},
        text=f"Raw success by the graders; n excludes faults.\n\n{markdown_table(head, rows)}",
    )


def _read(path: Path) -> dict[str, Any]:
    way_out = _way_out(path)
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path} cannot be read as a result file ({error}): {way_out}") from error
    needed = ("checkpoint", "suite", "results", "stage_key", "success_rate", "interval", "num_valid", "num_success")
    needed = (*needed, "num_faults", "max_turns", "seeds", "desktops")
    missing = [name for name in needed if not isinstance(found, dict) or name not in found]
    if missing:
        raise DatasetError(f"{path} is not a result file (it has no '{missing[0]}'): {way_out}")
    return found


def _way_out(path: Path) -> str:
    return f"`{shell_line(PIPELINE, 'evaluate', '--output', path)}` writes one"


def _interval(result: dict[str, Any]) -> str:
    interval = result["interval"]
    return "" if interval is None else f"{interval['low']:.1%} - {interval['high']:.1%} ({interval['confidence']:.0%})"
