"""Reads one attempt of an OSWorld result folder: traj.jsonl, result.txt and screenshots, complete or not."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson

from osworld_pipeline.datasets.importers.images import ProvenImage, read_image
from osworld_pipeline.datasets.importers.lines import read_lines
from osworld_pipeline.datasets.regular_files import read_regular_file
from osworld_pipeline.dialects.commands import to_command
from osworld_pipeline.dialects.slime_actions import normalise_action
from osworld_pipeline.errors import ActionParseError, DatasetError

TRAJECTORY, RESULT, ARGUMENTS = "traj.jsonl", "result.txt", "args.json"
_FIRST_SCREEN = re.compile(r"(step_0(_.*)?|step_reset(_.*)?|initial.*)\.(png|jpe?g)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class ResultStep:
    number: int
    """The recorded number; several actions of one answer share it."""
    action: str
    """pyautogui code, or WAIT, DONE, FAIL; another action space's action as JSON."""
    image_action: str
    """The same action with points in pixels of its image. It differs only if our own export recorded both, because the
    screen was scaled down for the model."""
    response: str
    screen: ProvenImage | None
    """The screen before the action: OSWorld records the screen after each action, so this is the file of the previous
    step. The first step has one only if the run kept its first screen."""
    screen_problem: str
    """Why there is no screen; empty if there is one, or if none was recorded."""


@dataclass(frozen=True, kw_only=True)
class ResultAttempt:
    folder: Path
    task_id: str
    domain: str
    model: str
    steps: tuple[ResultStep, ...]
    score: float | None
    """The grader's score; None if there is none."""
    score_problem: str
    """Why there is no score; empty if there is one."""
    has_ended: bool
    """Whether the run finished: the model ended it, or its last row has done set."""
    log_error: str
    """Text of the harness in place of a step, such as a time limit."""
    problems: tuple[str, ...]
    """Unreadable lines and gaps in the step numbers; with any of them the steps are incomplete."""
    num_earlier_rows: int
    """Rows of runs before the last one: a restarted run appends to the same file, and the result is that of the last
    run."""
    started_at: float
    settings: Mapping[str, Any]
    """The run's args.json, if it has one."""


def find_attempts(root: Path) -> list[Path]:
    """Folders with a trajectory or a result, by path.

    Raises:
        DatasetError: there is none.
    """
    found = {path.parent for name in (TRAJECTORY, RESULT) for path in root.rglob(name)}
    if not found:
        raise DatasetError(
            f"no {TRAJECTORY} or {RESULT} in {root}: give a folder laid out as "
            "<action_space>/<observation_type>/<model>/<domain>/<task_id>/"
        )
    return sorted(found)


def read_attempt(folder: Path) -> ResultAttempt:
    """Raises DatasetError: no trajectory, one without a step, or one with a value that cannot be text."""
    rows, problems = _rows(folder)
    log_error = next((str(row["Error"]) for row in rows if "Error" in row and "action" not in row), "")
    rows, num_earlier = _last_run([row for row in rows if "action" in row])
    if not rows:
        raise DatasetError(f"{TRAJECTORY} holds no step" + (f": {log_error}" if log_error else ""))
    numbers = [_number(row) for row in rows]
    gaps = [f"step {after} follows step {before}" for before, after in pairwise(numbers) if after > before + 1]
    if numbers[0] > 1:
        gaps.insert(0, f"the first step is number {numbers[0]}")
    score, score_problem = _score(folder / RESULT)
    last = rows[-1]
    return ResultAttempt(
        folder=folder,
        task_id=plain(folder.name),
        domain=plain(folder.parent.name),
        model=plain(folder.parent.parent.name),
        steps=tuple(_steps(folder, rows)),
        score=score,
        score_problem=score_problem,
        has_ended=last.get("done") is True or _action(last) in ("DONE", "FAIL"),
        log_error=log_error,
        problems=(*problems, *gaps),
        num_earlier_rows=num_earlier,
        started_at=_timestamp(rows[0].get("action_timestamp")),
        settings=_settings(folder),
    )


def read_result(folder: Path) -> ResultAttempt:
    """Does the same as `read_attempt`, but accepts an attempt without recorded steps: it has the grader's score if
    there is one, else it was cut short before its first step."""
    try:
        return read_attempt(folder)
    except DatasetError as error:
        score, score_problem = _score(folder / RESULT)
        return ResultAttempt(
            folder=folder,
            task_id=plain(folder.name),
            domain=plain(folder.parent.name),
            model=plain(folder.parent.parent.name),
            steps=(),
            score=score,
            score_problem=score_problem,
            has_ended=score is not None,
            log_error="" if score is not None else str(error),
            problems=(str(error),),
            num_earlier_rows=0,
            started_at=0.0,
            settings=_settings(folder),
        )


def plain(name: str) -> str:
    """A file name as text that any table can store; bytes that are not UTF-8 become `?`."""
    return name.encode("utf-8", "replace").decode()


def _rows(folder: Path) -> tuple[list[Mapping[str, Any]], list[str]]:
    path = folder / TRAJECTORY
    if not path.is_file():
        raise DatasetError(f"there is a {RESULT} and no {TRAJECTORY}")
    rows: list[Mapping[str, Any]] = []
    problems: list[str] = []
    for line in read_lines(path):
        if line.record is None:
            problems.append(f"line {line.number} of {TRAJECTORY}: {line.reason}")
        else:
            rows.append(line.record)
    return rows, problems


def _last_run(rows: list[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], int]:
    """A lower step number starts another run."""
    start = 0
    for index in range(1, len(rows)):
        if _number(rows[index]) < _number(rows[index - 1]):
            start = index
    return rows[start:], start


def _number(row: Mapping[str, Any]) -> int:
    number = row.get("step_num", row.get("step"))
    return number if isinstance(number, int) and not isinstance(number, bool) else 1


def _steps(folder: Path, rows: list[Mapping[str, Any]]) -> list[ResultStep]:
    first = sorted(path.name for path in folder.iterdir() if _FIRST_SCREEN.fullmatch(path.name))
    name: Any = first[0] if first else None
    steps: list[ResultStep] = []
    for index, row in enumerate(rows):
        screen, problem = None, ""
        if index or name is not None:
            try:
                screen = read_image(folder, name)
            except DatasetError as error:
                problem = str(error)
        steps.append(
            ResultStep(
                number=_number(row),
                action=_action(row),
                image_action=_image_action(row) or _action(row),
                response=_text(row.get("response")),
                screen=screen,
                screen_problem=problem,
            )
        )
        name = row.get("screenshot_file")
    return steps


def _action(row: Mapping[str, Any]) -> str:
    """The action as text; some agents wrap the code or the special action in an object."""
    action = row.get("action")
    if isinstance(action, dict):
        kind = action.get("action_type")
        wrapped = next((action[key] for key in ("command", "code") if isinstance(action.get(key), str)), None)
        return wrapped or (kind if kind in ("WAIT", "DONE", "FAIL") else _text(action))
    return _text(action)


def _image_action(row: Mapping[str, Any]) -> str | None:
    info = row.get("info")
    own = info.get("model_action") if isinstance(info, dict) else None
    try:
        return to_command(normalise_action(own)) if isinstance(own, dict) else None
    except ActionParseError:
        return None


def _text(value: Any) -> str:
    if value is None:
        return ""
    try:
        return value if isinstance(value, str) else orjson.dumps(value).decode()
    except orjson.JSONEncodeError as error:
        raise DatasetError(f"{TRAJECTORY} holds a value that cannot be text ({error})") from error


def _score(path: Path) -> tuple[float | None, str]:
    if not path.is_file():
        return None, f"no {RESULT}"
    try:
        text = read_regular_file(path)[:200].decode("utf-8", "replace").strip()
        score = {"True": 1.0, "False": 0.0}[text] if text in ("True", "False") else float(text)
    except (OSError, ValueError) as error:
        return None, f"{RESULT} holds no number ({error})"
    if not math.isfinite(score) or not 0.0 <= score <= 1.0:
        return None, f"{RESULT} holds {text[:40]}, which is not a score from 0 to 1"
    return score, ""


def _timestamp(value: Any) -> float:
    """Unix time of `20240102@030405`, taken as UTC; 0 if it is not one."""
    for form in ("%Y%m%d@%H%M%S", "%Y%m%d@%H%M%S%f"):
        try:
            return datetime.strptime(str(value), form).replace(tzinfo=UTC).timestamp()
        except ValueError:
            continue
    return 0.0


def _settings(folder: Path) -> Mapping[str, Any]:
    """OSWorld's runs write their arguments next to the domain folders."""
    path = folder.parent.parent / ARGUMENTS
    try:
        settings = orjson.loads(read_regular_file(path))
    except (OSError, orjson.JSONDecodeError):
        return {}
    return settings if isinstance(settings, dict) else {}
