"""The text before a window: the task, and the earlier actions, one line each.

1. Click the OK button: left_click [100, 50] (ok)
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from osworld_pipeline.agent.observation_text import result_part, task_part
from osworld_pipeline.dialects import Dialect
from osworld_pipeline.dialects.actions import SEQUENCE, Arguments, actions_in

MAX_DESCRIPTION_CHARS = 120
MAX_ACTION_CHARS = 160
MAX_RESULT_CHARS = 120
HEADING = "[Earlier Actions]"


@dataclass(frozen=True, kw_only=True)
class SeenTurn:
    """A turn as text."""

    text: str
    """The observation's text."""
    answer: str | None = None
    """None if there is no action yet."""


def opening_text(turns: Sequence[SeenTurn], first: int, dialect: Dialect, *, num_lines: int | None = None) -> str:
    """The text of a window's first turn, `turns[first]`: its own, after the task and the earlier actions. `num_lines`
    keeps only the newest of those and states how many are left out."""
    if first == 0:
        return turns[0].text
    lines = [_action_line(index, turns, dialect) for index in range(first)]
    num_cut = 0 if num_lines is None else max(0, first - num_lines)
    cut = [f"({num_cut} earlier actions are left out)"] if num_cut else []
    parts = [task_part(turns[0].text), HEADING, *cut, *lines[num_cut:], turns[first].text]
    return "\n".join(part for part in parts if part)


def _action_line(index: int, turns: Sequence[SeenTurn], dialect: Dialect) -> str:
    turn = dialect.parse(turns[index].answer or "")
    action = "no action could be read" if turn.arguments is None else _in_words(turn.arguments)
    said = f"{_cut(turn.description, MAX_DESCRIPTION_CHARS)}: " if turn.description else ""
    result = _cut(result_part(turns[index + 1].text), MAX_RESULT_CHARS)
    return f"{index + 1}. {said}{_cut(action, MAX_ACTION_CHARS)}{f' ({result})' if result else ''}"


def _in_words(arguments: Arguments) -> str:
    if arguments["action"] == SEQUENCE:
        return "; ".join(map(_in_words, actions_in(arguments)))
    values = [json.dumps(value, ensure_ascii=False) for key, value in arguments.items() if key != "action"]
    return " ".join([arguments["action"], *values])


def _cut(text: str, max_length: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= max_length else f"{line[: max_length - 3]}..."
