"""Exports evaluation episodes as OSWorld's own result tree:
`<action_space>/<observation_type>/<model>/<domain>/<task_id>/{result.txt, traj.jsonl, step_<n>_<timestamp>.png}`.

OSWorld's runner saves at step n the screen AFTER action n; our steps have the screen that the model saw BEFORE its
action. So `step_<n>` is the screenshot of our next step, and `step_0` is the screen before the first action, which the
runner does not save and traj.jsonl does not mention. After the last action there is no screenshot, unless that action
was DONE or FAIL: these change nothing, so the screen is still the one that the model saw.
"""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from osworld_pipeline.datasets.exporters.folder import export_folder, folder_name, write_manifest
from osworld_pipeline.datasets.exporters.selection import (
    EPISODES_A_BATCH,
    OnProgress,
    Selection,
    count,
    export_views,
    steps_of,
    stream,
)
from osworld_pipeline.domain.pictures import open_picture
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.store import BlobStore

ACTION_SPACE = "pyautogui"
LEFT_OUT_FILE = "LEFT_OUT.md"
"""A file in the root: the episodes without a result, with reasons."""
RESULT_FILE = "result.txt"
TRAJECTORY_FILE = "traj.jsonl"
_TIMESTAMP = "%Y%m%d@%H%M%S%f"
_ENDS = {"DONE": "done", "FAIL": "fail"}
# OSWorld's tree has one attempt per task; each seed of an evaluation becomes a separate model, in order.
_ATTEMPTS = """
WITH chosen AS ({chosen}),
trees AS (
    SELECT v.stage_key, v.checkpoint_id,
           bool_or(contains(s.observation_text, '[Accessibility Tree]' || chr(10))) AS has_tree
    FROM chosen v JOIN steps s USING (episode_id) WHERE s.purpose = 'evaluate' AND s.step_index = 0
    GROUP BY v.stage_key, v.checkpoint_id
)
SELECT v.*, dense_rank() OVER (PARTITION BY v.checkpoint_id, v.stage_key ORDER BY v.seed) AS run,
       count(DISTINCT v.stage_key) OVER (PARTITION BY v.checkpoint_id) AS num_evaluations,
       coalesce(o.has_tree, false) AS has_tree, c.recipe_digest, c.weights_digest
FROM chosen v
LEFT JOIN trees o ON o.stage_key = v.stage_key AND o.checkpoint_id = v.checkpoint_id
LEFT JOIN checkpoints c ON c.checkpoint_id = v.checkpoint_id
ORDER BY v.checkpoint_id, v.stage_key, v.task_id, run
"""
_LEFT_OUT_HEAD = """# Episodes without a result

An episode that ended in a fault or a timeout, or that a person touched, has no grader's score that counts. It has a
trajectory and no `result.txt`: a 0.0 would be false. OSWorld's scripts treat such a task as unfinished and exclude it
from their rates, as `lenient` success does; `strict` success counts it as not solved.

| model | domain | task | seed | outcome | what happened |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True, kw_only=True)
class ResultsExport:
    """Summary of the export."""

    num_episodes: int
    num_results: int
    """Episodes with a grader's score, and therefore a result.txt."""
    num_faults: int
    """Episodes without a grader's score that counts: no result.txt; OSWorld's scripts treat them as unfinished, not as
    0."""
    num_successes: int
    num_screenshots: int
    models: tuple[str, ...]


def export_osworld_results(
    state: StateDir,
    target: Path,
    *,
    selection: Selection | None = None,
    replace: bool = False,
    on_progress: OnProgress | None = None,
) -> ResultsExport:
    """Writes the tree into a new folder `target`; `selection` is over the `evals` view. LEFT_OUT.md names the episodes
    without a result.

    Raises:
        TableError: a table cannot be read, or a filter is bad SQL.
        StoreError: `target` exists, an image is missing, or the file system refused.
    """
    selection = selection or Selection()
    chosen = selection.over("evals", reward="reward", checkpoint="checkpoint_id")
    blobs = BlobStore(state.blobs)
    models: dict[str, None] = {}
    counts = dict.fromkeys(("num_episodes", "num_results", "num_successes", "num_screenshots"), 0)
    with (
        export_views(state) as connection,
        export_folder(target, replace=replace) as folder,
        (folder / LEFT_OUT_FILE).open("w", encoding="utf-8") as left_out,
    ):
        left_out.write(_LEFT_OUT_HEAD)
        total = count(connection, chosen, of="evals")
        for batch in stream(connection, _ATTEMPTS.format(chosen=chosen), batch_rows=EPISODES_A_BATCH):
            rows = batch.to_pylist()
            steps = steps_of(connection, [row["episode_id"] for row in rows])
            for row in rows:
                model = folder / ACTION_SPACE / _observation_type(row) / folder_name(_model(row))
                if str(model) not in models:
                    models[str(model)] = None
                    _write_arguments(model, row)
                place = model / folder_name(_domain(row)) / folder_name(row["task_id"])
                counts["num_screenshots"] += _write_episode(place, row, steps[row["episode_id"]], blobs)
                counts["num_episodes"] += 1
                counts["num_results"] += row["is_valid"]
                counts["num_successes"] += bool(row["success"])
                if not row["is_valid"]:
                    left_out.write(_left_out_row(place, row))
                if on_progress is not None:
                    on_progress(counts["num_episodes"], total)
        result = ResultsExport(
            **counts,
            num_faults=counts["num_episodes"] - counts["num_results"],
            models=tuple(Path(model).name for model in models),
        )
        write_manifest(folder, "osworld-results", {"selection": selection.as_json(), "counts": asdict(result)})
    return result


def _model(row: Mapping[str, Any]) -> str:
    """The model name: the checkpoint, then the evaluation if the checkpoint has several, then the index of the seed
    from the second seed on."""
    evaluation = row["stage_key"].removeprefix(f"eval-{row['checkpoint_id']}-")
    name = row["checkpoint_id"] + (f"_{evaluation or 'unknown'}" if row["num_evaluations"] > 1 else "")
    return name if row["run"] == 1 else f"{name}_run{row['run']}"


def _left_out_row(place: Path, row: Mapping[str, Any]) -> str:
    error = " ".join((row["error"] or "").split()).replace("|", "\\|")
    cells = (place.parent.parent.name, place.parent.name, place.name, str(row["seed"]), row["outcome"], error)
    return f"| {' | '.join(cells)} |\n"


def _observation_type(row: Mapping[str, Any]) -> str:
    return "screenshot_a11y_tree" if row["has_tree"] else "screenshot"


def _domain(row: Mapping[str, Any]) -> str:
    return row["domain"] or row["family"]


def _write_arguments(model: Path, row: Mapping[str, Any]) -> None:
    """`args.json`, in which OSWorld's runner keeps the settings of a run."""
    model.mkdir(parents=True)
    arguments = {
        "action_space": ACTION_SPACE,
        "observation_type": _observation_type(row),
        "model": model.name,
        "max_steps": row["max_turns"],
        "temperature": row["temperature"],
        **{name: row[name] for name in ("checkpoint_id", "stage", "recipe_digest", "weights_digest", "run", "seed")},
        **{name: row[name] for name in ("engine", "provider", "image_digest", "grader_version", "stage_key")},
        **{name: row[name] for name in ("suite", "suite_name")},
    }
    (model / "args.json").write_text(json.dumps(arguments, ensure_ascii=False, indent=4), encoding="utf-8")


def _write_episode(place: Path, row: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], blobs: BlobStore) -> int:
    """Writes one task's folder; returns the number of its screenshots."""
    place.mkdir(parents=True)
    num_screenshots = 0
    # Time of the runner's screenshots: after the reset, then after each action.
    clock_s = (row["started_at"] or 0.0) + (row["reset_s"] or 0.0)
    if steps:
        _write_png(place / f"step_0_{_timestamp(clock_s)}.png", blobs.read(steps[0]["screenshot_sha256"]))
        num_screenshots += 1
    with (place / TRAJECTORY_FILE).open("wb") as sink:
        for index, step in enumerate(steps):
            clock_s += (step["model_s"] or 0.0) + (step["step_s"] or 0.0)
            stamp = _timestamp(clock_s)
            seen_after = _seen_after(steps, index)
            name = f"step_{index + 1}_{stamp}.png" if seen_after else None
            if seen_after and name:
                _write_png(place / name, blobs.read(seen_after["screenshot_sha256"]))
                num_screenshots += 1
            sink.write(orjson.dumps(_row(step, index, stamp, name), option=orjson.OPT_APPEND_NEWLINE))
    if row["is_valid"]:
        (place / RESULT_FILE).write_text(f"{row['reward']}\n", encoding="utf-8")
    facts = {name: row[name] for name in ("episode_id", "task_id", "seed", "attempt", "outcome", "error", "reward")}
    (place / "episode.json").write_text(json.dumps(facts, ensure_ascii=False, indent=2), encoding="utf-8")
    return num_screenshots


def _seen_after(steps: Sequence[Mapping[str, Any]], index: int) -> Mapping[str, Any] | None:
    """The step whose screenshot shows the screen after action `index`; None if there is no screenshot."""
    if index + 1 < len(steps):
        return steps[index + 1]
    return steps[index] if steps[index]["command"] in _ENDS else None


def _row(step: Mapping[str, Any], index: int, stamp: str, screenshot_file: str | None) -> dict[str, Any]:
    end = _ENDS.get(step["command"] or "")
    return {
        "step_num": index + 1,
        "action_timestamp": stamp,
        "action": step["command"],
        "response": step["response_text"],
        # As in OSWorld's steps: the grader's score is only in result.txt.
        "reward": 0,
        "done": end is not None,
        "info": ({end: True} if end else {})
        | {
            "model_action": None if step["action"] is None else json.loads(step["action"]),
            "action_error": step["action_error"],
            "fallback_used": step["fallback_used"],
            "policy_version": step["policy_version"],
        },
        "screenshot_file": screenshot_file,
    }


def _timestamp(clock_s: float) -> str:
    return datetime.fromtimestamp(clock_s, UTC).strftime(_TIMESTAMP)


def _write_png(path: Path, data: bytes) -> None:
    """Writes a PNG byte for byte; another format is converted to PNG."""
    if not data.startswith(b"\x89PNG"):
        sink = io.BytesIO()
        with open_picture(data) as image:
            image.save(sink, format="PNG")
        data = sink.getvalue()
    path.write_bytes(data)
