"""The card of an exported dataset: front matter for the hub, then a description of the rows."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from osworld_pipeline.columns import EPISODES, REPLAY_BUFFER, SEQUENCES, STEPS, doc_of, unit_of

_SCHEMAS = {"steps": STEPS, "episodes": EPISODES, "sequences": SEQUENCES, "replay": REPLAY_BUFFER}
_ADDED = {
    "screenshot": "The exact bytes that the model saw before it acted.",
    "images": "The images in the order of their placeholders in `messages`.",
    "image_sha256s": "SHA-256 of each of the images.",
    "instruction": "The instruction of the task.",
    "domain": "The domain of the task.",
    "licence": "The licence of the row's source; NULL if unknown.",
    "kind": "`demonstration`: chat turns of a dataset or an import.",
    "verified_reward": "The best reward of re-executing its actions; NULL if not tried. From 0 to 1.",
    "verified_at": "Time of the last verification, in seconds since 1970.",
    "num_verifications": "Number of verifications.",
    "episode_id": "The attempt; the key of `episodes`.",
    "checkpoint_id": "The policy that acted.",
    "recorded_at": "NULL for demonstrations.",
}
_ABOUT = {
    "steps": "One row for each turn of an episode: the model's screenshot and response, the action, its result.",
    "episodes": "One row for each attempt at a task; its turns are the rows of `steps` with the same `episode_id`.",
    "sequences": "One row for each forward pass of an episode, with the sampled tokens and their log-probabilities.",
    "replay": "One row for each demonstration: chat turns, and the images in the order of their placeholders.",
}


@dataclass(frozen=True, kw_only=True)
class LicenceCount:
    """Rows of one source under one licence."""

    source: str
    licence: str | None
    """None if unknown."""
    num_rows: int


@dataclass(frozen=True, kw_only=True)
class Card:
    """The content of the card; every mapping is by config."""

    num_rows: Mapping[str, int]
    shards: Mapping[str, Sequence[str]]
    """The files; a config without rows has none and is not listed for the library."""
    columns: Mapping[str, pa.Schema]
    licences: Mapping[str, Sequence[LicenceCount]]
    checkpoints: Sequence[tuple[Any, ...]]
    """Id, stage, parent, recipe digest, data digest, weights digest."""


def render_card(card: Card) -> str:
    """The card as Markdown with YAML front matter."""
    parts = [_front_matter(card), "# Desktop agent trajectories\n", _configs(card), _licences(card)]
    return "\n".join([*parts, _checkpoints(card), _columns(card)])


def _front_matter(card: Card) -> str:
    known = sorted({row.licence for rows in card.licences.values() for row in rows if row.licence})
    is_complete = all(row.licence for rows in card.licences.values() for row in rows)
    lines = ["---", "license:"]
    # JSON strings are YAML strings.
    lines += [f"- {json.dumps(name)}" for name in [*known, *([] if is_complete and known else ["unknown"])]]
    lines += ["configs:"]
    for index, name in enumerate(card.shards):
        lines += [f"- config_name: {name}", "  data_files:", "  - split: train", f"    path: data/{name}-*.parquet"]
        lines += ["  default: true"] if index == 0 else []
    return "\n".join([*lines, "---", ""])


def _configs(card: Card) -> str:
    rows = [
        f"| `{name}` | {card.num_rows[name]:,} | {len(card.shards[name])} | {_ABOUT[name]} |" for name in card.shards
    ]
    return "\n".join(["| config | rows | files | what a row is |", "|---|---|---|---|", *rows, ""])


def _licences(card: Card) -> str:
    lines = ["## Licences\n", "| config | source | licence | rows |", "|---|---|---|---|"]
    unknown = 0
    for name, counts in card.licences.items():
        for row in counts:
            unknown += 0 if row.licence else row.num_rows
            lines.append(
                f"| `{name}` | {_cell(row.source)} | {_cell(row.licence or '**unknown**')} | {row.num_rows:,} |"
            )
    if unknown:
        lines.append(
            f"\n**The licence of {unknown:,} rows is unknown** (the sources above so marked): ask "
            "their authors before you publish or train on these rows."
        )
    return "\n".join([*lines, ""])


def _checkpoints(card: Card) -> str:
    if not card.checkpoints:
        return "## Checkpoints\n\nNo row was made by a checkpoint.\n"
    lines = [
        "## Checkpoints\n",
        "| checkpoint | stage | parent | recipe | data | weights |",
        "|---|---|---|---|---|---|",
    ]
    lines += ["| " + " | ".join(_cell(value) for value in row) + " |" for row in card.checkpoints]
    return "\n".join([*lines, ""])


def _columns(card: Card) -> str:
    lines = ["## Columns"]
    for name, schema in card.columns.items():
        lines += [f"\n### {name}\n", "| column | type | meaning |", "|---|---|---|"]
        lines += [f"| `{field.name}` | `{_type(field.type)}` | {_cell(_meaning(name, field))} |" for field in schema]
    return "\n".join([*lines, ""])


def _type(kind: pa.DataType) -> str:
    text = str(kind).replace("struct<bytes: binary, path: string>", "image")
    return text if len(text) <= 60 else f"{text[:57]}..."


def _meaning(config: str, field: pa.Field) -> str:
    if field.name in _ADDED:
        return _ADDED[field.name]
    schema = _SCHEMAS[config] if field.name in _SCHEMAS[config].names else EPISODES
    if field.name not in schema.names:
        return ""
    known = schema.field(field.name)
    unit = unit_of(known)
    return doc_of(known) + (f" In {unit}." if unit else "")


def _cell(value: Any) -> str:
    return "" if value is None else " ".join(str(value).split()).replace("|", "\\|")
