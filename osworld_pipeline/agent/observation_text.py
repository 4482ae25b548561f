"""The text of an observation next to its screenshot: bracketed headings in a fixed order; empty parts are omitted.

In `append` mode the model still has its first observation in its context, so later turns omit parts that cannot have
changed: the domain hint and the task are only in the first turn; tree, terminal and the last action's result are in
every turn that has them.
"""

from dataclasses import dataclass
from typing import Any

from osworld_pipeline.domain.observation import Observation
from osworld_pipeline.domain.task import Task

TERMINAL_MAX_LENGTH = 2_000
RESULT_MAX_LENGTH = 300


@dataclass(frozen=True, kw_only=True)
class LastAction:
    """The result of the action before this observation."""

    error: str | None = None
    """None if it ran."""


def observation_text(
    observation: Observation,
    task: Task,
    *,
    step_index: int,
    last_action: LastAction | None,
    a11y_max_length: int,
) -> str:
    """The user turn's text; empty if a later turn has only a screenshot."""
    parts: list[tuple[str, str]] = []
    if step_index == 0:
        if task.domain and task.domain != "unknown":
            parts.append(("Domain hint", task.domain))
        parts.append(("Task", task.instruction))
    if observation.accessibility_tree and a11y_max_length > 0:
        parts.append(("Accessibility Tree", cut_text(observation.accessibility_tree, a11y_max_length)))
    if observation.terminal:
        parts.append(("Terminal Output", _last_part(observation.terminal, TERMINAL_MAX_LENGTH)))
    if last_action is not None:
        result = "ok" if last_action.error is None else cut_text(f"error: {last_action.error}", RESULT_MAX_LENGTH)
        parts.append(("Last Action Result", result))
    return "\n".join(f"[{heading}]\n{body}" for heading, body in parts)


SCREENSHOT_LEFT_OUT = "[Screenshot left out]"
"""Replaces the screenshot in the text-only ablation; the screenshot itself is still stored with its step."""
_RESULT = "[Last Action Result]"
_OF_ONE_TURN = ("[Accessibility Tree]", "[Terminal Output]", _RESULT, SCREENSHOT_LEFT_OUT)
"""Headings of parts that apply only to their own turn."""


def without_screenshot(text: str) -> str:
    """The user turn's text for a model that does not receive the screenshot."""
    return f"{text}\n{SCREENSHOT_LEFT_OUT}" if text else SCREENSHOT_LEFT_OUT


def task_part(text: str) -> str:
    """The constant parts of the first turn's text: domain hint and task."""
    lines = text.split("\n")
    end = next((index for index, line in enumerate(lines) if line in _OF_ONE_TURN), len(lines))
    return "\n".join(lines[:end])


def result_part(text: str) -> str:
    """The result of the previous action in a turn's text, on one line; empty if there is none."""
    _, heading, result = text.rpartition(f"{_RESULT}\n")
    return result.removesuffix(f"\n{SCREENSHOT_LEFT_OUT}").split("\n")[0] if heading else ""


def cut_text(text: str, max_length: int) -> str:
    """The first characters of the text, at most `max_length`, with a mark where it was cut."""
    return text if len(text) <= max_length else f"{text[:max_length]}\n... (truncated)"


def _last_part(text: str, max_length: int) -> str:
    # The last output of a terminal matters most.
    return text if len(text) <= max_length else f"(truncated) ...\n{text[-max_length:]}"


def system_message(text: str) -> dict[str, Any]:
    return {"role": "system", "content": [{"type": "text", "text": text}]}


def user_message(text: str, *, num_images: int = 1) -> dict[str, Any]:
    """An observation as a chat turn: the screenshot, then the text if there is any."""
    content: list[dict[str, Any]] = [{"type": "image"} for _ in range(num_images)]
    if text:
        content.append({"type": "text", "text": text})
    return {"role": "user", "content": content}


def assistant_message(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}
