"""The text beside a screenshot: bracketed headings in a fixed order, each part only where there is something to say.

In `append` mode the model still has its first observation before it, so later turns leave out what cannot have
changed: the domain hint and the task stand in the first turn only; tree, terminal and the last action's result follow
with every turn that has them.
"""

from dataclasses import dataclass
from typing import Any

from osworld_pipeline.domain.observation import Observation
from osworld_pipeline.domain.task import Task

TERMINAL_MAX_LENGTH = 2_000
RESULT_MAX_LENGTH = 300


@dataclass(frozen=True, kw_only=True)
class LastAction:
    """What became of the action before this observation."""

    error: str | None = None
    """None where it ran."""


def observation_text(
    observation: Observation,
    task: Task,
    *,
    step_index: int,
    last_action: LastAction | None,
    a11y_max_length: int,
) -> str:
    """The user turn's text; empty where a later turn has nothing but its screenshot to show."""
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
"""Stands for the screenshot in the text-only ablation; the screenshot itself is stored with its step all the same."""
_RESULT = "[Last Action Result]"
_OF_ONE_TURN = ("[Accessibility Tree]", "[Terminal Output]", _RESULT, SCREENSHOT_LEFT_OUT)
"""Headings of what only the turn itself is about."""


def without_screenshot(text: str) -> str:
    """The user turn's text for a model that is not shown the screenshot."""
    return f"{text}\n{SCREENSHOT_LEFT_OUT}" if text else SCREENSHOT_LEFT_OUT


def task_part(text: str) -> str:
    """Of the first turn's text what stays true: domain hint and task."""
    lines = text.split("\n")
    end = next((index for index, line in enumerate(lines) if line in _OF_ONE_TURN), len(lines))
    return "\n".join(lines[:end])


def result_part(text: str) -> str:
    """What a turn's text says of the action before it, in one line; empty where it says nothing."""
    _, heading, result = text.rpartition(f"{_RESULT}\n")
    return result.removesuffix(f"\n{SCREENSHOT_LEFT_OUT}").split("\n")[0] if heading else ""


def cut_text(text: str, max_length: int) -> str:
    """At most `max_length` characters of the text, and a mark where it was cut."""
    return text if len(text) <= max_length else f"{text[:max_length]}\n... (truncated)"


def _last_part(text: str, max_length: int) -> str:
    # What a terminal printed last is what matters.
    return text if len(text) <= max_length else f"(truncated) ...\n{text[-max_length:]}"


def system_message(text: str) -> dict[str, Any]:
    return {"role": "system", "content": [{"type": "text", "text": text}]}


def user_message(text: str, *, num_images: int = 1) -> dict[str, Any]:
    """An observation as a chat turn: the screenshot, then the text where there is any."""
    content: list[dict[str, Any]] = [{"type": "image"} for _ in range(num_images)]
    if text:
        content.append({"type": "text", "text": text})
    return {"role": "user", "content": content}


def assistant_message(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}
