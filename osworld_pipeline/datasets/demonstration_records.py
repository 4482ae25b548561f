"""One demonstration as a JSONL record in the variants found in datasets: whole, cut into chunks, in other formats, and
broken."""

import base64
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

CHUNK_TURNS = 2
"""Assistant turns in a chunk."""

Messages = Sequence[Mapping[str, Any]]
_TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def line_of(record: Any) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode()


def whole_record(
    task_id: str,
    messages: Messages,
    images: Sequence[bytes],
    *,
    id_key: str,
    turns_key: str,
    as_text: bool,
    data_uri: bool,
    reward: float | None,
) -> dict[str, Any]:
    """`id_key`: task_id, id or metadata (the id is a key inside it). `as_text`: content as one string with `<image>`
    placeholders, else a list of parts."""
    prefix = "data:image/png;base64," if data_uri else ""
    return {
        **({"metadata": {"task_id": task_id}} if id_key == "metadata" else {id_key: task_id}),
        turns_key: [_text_turn(message) if as_text else dict(message) for message in messages],
        "images": [prefix + base64.b64encode(image).decode() for image in images],
        **({} if reward is None else {"reward": reward}),
    }


def _text_turn(message: Mapping[str, Any]) -> dict[str, Any]:
    parts = ["<image>" if part["type"] == "image" else part["text"] for part in message["content"]]
    return {"role": message["role"], "content": "".join(parts)}


def chunk_records(task_id: str, messages: Messages, images: Sequence[bytes]) -> list[dict[str, Any]]:
    """A long demonstration cut after every second assistant turn. A later chunk starts with the heading of the first
    observation, which states the task."""
    system, turns = messages[0], messages[1:]
    heading = _text_of(turns[0])
    size = 2 * CHUNK_TURNS
    records = []
    for index, start in enumerate(range(0, len(turns), size)):
        part = [dict(message) for message in turns[start : start + size]]
        if index:
            text = "\n".join(piece for piece in (heading, _text_of(part[0])) if piece)
            part[0] = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}
        first_image = start // 2
        records.append(
            whole_record(
                f"{task_id}_chunk{index}",
                [system, *part],
                images[first_image : first_image + len(part) // 2],
                id_key="metadata",
                turns_key="conversations",
                as_text=bool(index % 2),
                data_uri=False,
                reward=None,
            )
        )
    return records


def _text_of(message: Mapping[str, Any]) -> str:
    return "".join(part["text"] for part in message["content"] if part["type"] == "text")


def pyautogui_record(task_id: str, messages: Messages, images: Sequence[bytes]) -> dict[str, Any]:
    """Another format: answers that type, press keys, click or terminate are bare pyautogui calls, DONE or FAIL; other
    answers keep their tool call."""
    return _with_answers(task_id, messages, images, _bare_answer)


def unknown_action_record(task_id: str, messages: Messages, images: Sequence[bytes]) -> dict[str, Any]:
    """A record whose first answer names an action that does not exist; it cannot be parsed."""
    answers = 0

    def spoil(text: str) -> str:
        nonlocal answers
        answers += 1
        if answers > 1:
            return text
        return 'Action: Think\n<tool_call>{"name":"computer_use","arguments":{"action":"ponder"}}</tool_call>'

    return _with_answers(task_id, messages, images, spoil)


def _with_answers(task_id: str, messages: Messages, images: Sequence[bytes], rewrite: Any) -> dict[str, Any]:
    turns = [
        {"role": "assistant", "content": [{"type": "text", "text": rewrite(_text_of(message))}]}
        if message["role"] == "assistant"
        else message
        for message in messages
    ]
    return whole_record(
        task_id, turns, images, id_key="metadata", turns_key="messages", as_text=True, data_uri=False, reward=None
    )


def _bare_answer(text: str) -> str:
    match = _TOOL_CALL.search(text)
    if match is None:
        return text
    arguments = json.loads(match.group(1))["arguments"]
    match arguments:
        case {"action": "type", "text": written}:
            return f"pyautogui.write({json.dumps(written, ensure_ascii=False)})"
        case {"action": "key", "keys": keys}:
            return f"pyautogui.hotkey({', '.join(json.dumps(key) for key in keys)})"
        case {"action": "left_click", "coordinate": [x, y]}:
            return f"pyautogui.click({x}, {y})"
        case {"action": "terminate", "status": status}:
            return "DONE" if status == "success" else "FAIL"
        case _:
            return text


def broken_lines(whole: bytes) -> tuple[bytes, ...]:
    """Four invalid lines: truncated JSON, not an object, no turns, turns of the wrong kind."""
    return (
        whole[: min(len(whole) // 2, 400)],
        b'["not", "an", "object"]',
        line_of({"task_id": "desktop-basics-no-turns", "images": []}),
        line_of({"id": "desktop-basics-wrong-turns", "messages": "user: hello", "images": []}),
    )
