"""Exports replay and tasks in Slime-OSWorld's files: `osworld_replay_train.jsonl`, whose rows keep their origin in
`metadata`, and the two task Parquets. Demonstrations come from the replay table; online successes are converted to chat
turns, from the model's observations and responses."""

import base64
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import duckdb
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from osworld_pipeline.datasets.artefacts import ALL_FILE, REPLAY_FILE, TASK_COLUMNS, TRAIN_FILE
from osworld_pipeline.datasets.exporters.folder import export_folder, write_manifest
from osworld_pipeline.datasets.exporters.selection import (
    EPISODES_A_BATCH,
    OnProgress,
    Selection,
    count,
    export_views,
    steps_of,
    stream,
)
from osworld_pipeline.datasets.normalize import IMAGE_PLACEHOLDER
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.store import BlobStore

DEMONSTRATIONS_A_BATCH = 64
# Slime-OSWorld takes `domain` from the config; ours may be more exact. Older tables have only ours. Slime-OSWorld
# identifies tasks by id alone and uses the last of several in the tree.
_TASKS = """
SELECT DISTINCT ON (task_id) task_id, prompt, coalesce(config_domain, domain) AS domain, instruction,
       coalesce(task_config::VARCHAR, '{}') AS task_config, task_config_source, has_task_config, platform
FROM union_tasks ORDER BY task_id, task_config_source = 'osworld_repo', union_tasks.domain DESC
"""
# As in the union build: a config that cannot be run is left out; one that only lacks a grader is kept.
_TRAIN_TASKS = f"""
SELECT * FROM ({_TASKS})
WHERE has_task_config AND platform <> 'windows' AND task_id IN (SELECT task_id FROM exported_ids)
  AND (NOT json_exists(task_config, '$.evaluator')
       OR task_id NOT IN (SELECT task_id FROM rejects WHERE kind = 'bad_task' AND task_id IS NOT NULL))
"""  # noqa: S608 - our own SQL
_PROVENANCE = (
    "row_id",
    "kind",
    "is_reward_assumed",
    "dialect",
    "licence",
    "source_path",
    "source_line",
    "episode_id",
    "checkpoint_id",
    "recorded_at",
    "verified_reward",
    "verified_at",
)


@dataclass(frozen=True, kw_only=True)
class SlimeExport:
    """Summary of the export."""

    num_demonstrations: int
    num_online: int
    num_images: int
    num_tasks: int
    num_train_tasks: int


def export_slime(
    state: StateDir,
    target: Path,
    *,
    system_prompt: str,
    selection: Selection | None = None,
    with_online: bool = False,
    replace: bool = False,
    on_progress: OnProgress | None = None,
) -> SlimeExport:
    """Writes the three files into a new folder `target`.

    `selection` is over the `replay` view; its checkpoints filter online successes only, because demonstrations have
    none.

    Raises:
        TableError: a table cannot be read, or a filter is bad SQL.
        StoreError: `target` exists, an image is missing, or the file system refused.
    """
    selection = selection or Selection()
    blobs = BlobStore(state.blobs)
    online = selection.over("replay", reward="reward", licence="licence", checkpoint="checkpoint_id")
    either = Selection(min_reward=selection.min_reward, licences=selection.licences, where=selection.where)
    demonstrations = either.over("replay", reward="reward", licence="licence")
    queries = [f"SELECT * FROM ({demonstrations}) WHERE kind = 'demonstration'"]  # noqa: S608 - our own SQL
    if with_online:
        queries.append(f"SELECT * FROM ({online}) WHERE kind = 'episode'")  # noqa: S608 - our own SQL
    with export_views(state) as connection, export_folder(target, replace=replace) as folder:
        total = sum(count(connection, query, of="replay") for query in queries)
        written = _Written(total=total, on_progress=on_progress)
        with (folder / REPLAY_FILE).open("wb") as sink:
            for batch in stream(connection, queries[0], batch_rows=DEMONSTRATIONS_A_BATCH):
                for row in batch.to_pylist():
                    written.write(sink, row, row["messages"], row["images"] or [], blobs)
            for query in queries[1:]:
                for row, messages, images in _online(connection, query, system_prompt):
                    written.write(sink, row, messages, images, blobs)
        num_tasks, num_train = _write_tasks(connection, folder, written.task_ids)
        result = SlimeExport(
            num_demonstrations=written.num_rows["demonstration"],
            num_online=written.num_rows["episode"],
            num_images=written.num_images,
            num_tasks=num_tasks,
            num_train_tasks=num_train,
        )
        write_manifest(folder, "slime", {"selection": selection.as_json(), "counts": asdict(result)})
    return result


class _Written:
    """Writes records to the file and counts them."""

    def __init__(self, *, total: int, on_progress: OnProgress | None) -> None:
        self.num_rows = {"demonstration": 0, "episode": 0}
        self.num_images = 0
        self.task_ids: set[str] = set()
        self._total = total
        self._on_progress = on_progress

    def write(
        self,
        sink: BinaryIO,
        row: Mapping[str, Any],
        messages: Sequence[Mapping[str, Any]],
        images: Sequence[str],
        blobs: BlobStore,
    ) -> None:
        record = {
            "messages": [{"role": message["role"], "content": chat_content(message)} for message in messages],
            "images": [base64.b64encode(blobs.read(sha256)).decode() for sha256 in images],
            "reward": row["reward"],
            "task_id": row["task_id"],
            "num_steps": row["num_steps"],
            "original_task_id": row["original_task_id"],
            "source_dataset": row["source_dataset"],
            "quality_rank": row["quality_rank"],
            "metadata": {"task_id": row["task_id"]} | {name: row[name] for name in _PROVENANCE},
        }
        sink.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
        self.num_rows[row["kind"]] += 1
        self.num_images += len(images)
        self.task_ids.add(row["task_id"])
        if self._on_progress is not None:
            self._on_progress(sum(self.num_rows.values()), self._total)


def chat_content(message: Mapping[str, Any]) -> str | list[dict[str, str]]:
    """A turn's content as Slime-OSWorld's trainer reads it: text with `<image>` in place of an image.

    If the text itself contains `<image>`, or two texts are adjacent, reading it back would differ; such a turn stays a
    list of parts.
    """
    parts = message["content"]
    texts = [part["text"] or "" for part in parts if part["type"] == "text"]
    kinds = [part["type"] for part in parts]
    has_neighbours = any(pair == ("text", "text") for pair in itertools.pairwise(kinds))
    is_user = message["role"] == "user"
    if has_neighbours or (is_user and any(IMAGE_PLACEHOLDER in text for text in texts)):
        return [
            {"type": "image"} if part["type"] == "image" else {"type": "text", "text": part["text"] or ""}
            for part in parts
        ]
    return "\n".join(IMAGE_PLACEHOLDER if part["type"] == "image" else part["text"] or "" for part in parts)


def _online(
    connection: duckdb.DuckDBPyConnection, query: str, system_prompt: str
) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]], list[str]]]:
    """Rows with the chat turns and images of their episodes."""
    columns = f"SELECT * EXCLUDE (messages, images, action_types) FROM ({query})"  # noqa: S608 - our own SQL
    for batch in stream(connection, columns, batch_rows=EPISODES_A_BATCH):
        rows = batch.to_pylist()
        steps = steps_of(connection, [row["episode_id"] for row in rows])
        for row in rows:
            turns = [_turn("system", system_prompt, has_image=False)]
            for step in steps[row["episode_id"]]:
                turns.append(_turn("user", step["observation_text"], has_image=True))
                turns.append(_turn("assistant", step["response_text"], has_image=False))
            yield row, turns, [step["screenshot_sha256"] for step in steps[row["episode_id"]]]


def _turn(role: str, text: str, *, has_image: bool) -> dict[str, Any]:
    """A turn with the screenshot before the text, as in the model's prompt."""
    content = [{"type": "image"}] if has_image else []
    if text or not has_image:
        content.append({"type": "text", "text": text})
    return {"role": role, "content": content}


def _write_tasks(connection: duckdb.DuckDBPyConnection, folder: Path, replay_ids: set[str]) -> tuple[int, int]:
    """The task tables; training tasks are those with a config that can be run and a row in this export's replay, except
    Windows tasks. A config that only lacks a grader is included."""
    ids = pa.table({"task_id": pa.array(sorted(replay_ids), pa.string())})
    connection.register("exported_ids", ids)
    tasks = connection.sql(_TASKS).to_arrow_table().cast(TASK_COLUMNS)
    train = connection.sql(_TRAIN_TASKS).to_arrow_table().cast(TASK_COLUMNS)
    pq.write_table(tasks, folder / ALL_FILE)
    pq.write_table(train, folder / TRAIN_FILE)
    return tasks.num_rows, train.num_rows
