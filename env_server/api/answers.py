"""Writes answers: JSON in one piece, off the event loop if it contains a large screenshot."""

import asyncio
import base64
import json
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from fastapi import Response

from env_server.episodes.episode import OnTiming
from osworld_pipeline.domain.observation import Observation
from osworld_pipeline.wire import ErrorMessage, Fault, Message

INLINE_BYTES = 256 * 1024
"""Screenshots up to this size are written on the event loop, in well under a millisecond; a thread costs more."""


class ObservationWriter:
    """Writes answers that contain an observation, and reports how long each took."""

    def __init__(self, on_timing: OnTiming) -> None:
        self._on_timing = on_timing

    async def flat(self, observation: Observation, fields: Mapping[str, Any]) -> Response:
        """The observation's fields first, `fields` after them, all in one object."""
        return await self._write(observation, lambda: to_json({**observation_fields(observation), **fields}), 200)

    async def nested(
        self, observation: Observation, fields: Mapping[str, Any], *, accept: str = "", status: int = 200
    ) -> Response:
        """`fields` with the observation under its name; where the client accepts multipart/mixed, the image is a
        separate part and not in the JSON."""
        if "multipart/mixed" in accept:
            return self._multipart(observation, fields, status)
        return await self._write(
            observation, lambda: to_json({**fields, "observation": observation_fields(observation)}), status
        )

    async def _write(self, observation: Observation, write: Any, status: int) -> Response:
        start = time.perf_counter()
        body = write() if len(observation.screenshot) <= INLINE_BYTES else await asyncio.to_thread(write)
        self._on_timing("encode", time.perf_counter() - start)
        return Response(body, status_code=status, media_type="application/json")

    def _multipart(self, observation: Observation, fields: Mapping[str, Any], status: int) -> Response:
        start = time.perf_counter()
        boundary = secrets.token_hex(16)
        text_part = to_json({**fields, "observation": text_fields(observation)})
        body = b"".join((
            f"--{boundary}\r\nContent-Type: application/json\r\n\r\n".encode(), text_part,
            f"\r\n--{boundary}\r\nContent-Type: image/{observation.image_format}\r\n\r\n".encode(),
            observation.screenshot, f"\r\n--{boundary}--\r\n".encode(),
        ))  # fmt: skip
        self._on_timing("encode", time.perf_counter() - start)
        return Response(body, status_code=status, headers={"Content-Type": f"multipart/mixed; boundary={boundary}"})


def observation_fields(observation: Observation) -> dict[str, Any]:
    """The fields of an ObservationMessage."""
    fields = text_fields(observation)
    encoded = base64.b64encode(observation.screenshot).decode("ascii")
    return {
        "accessibility_tree": fields["accessibility_tree"],
        "terminal": fields["terminal"],
        "instruction": fields["instruction"],
        "screenshot_base64": encoded,
        "screenshot_format": fields["screenshot_format"],
        "screen_size": fields["screen_size"],
    }


def text_fields(observation: Observation) -> dict[str, Any]:
    """The same without the image."""
    return {
        "accessibility_tree": observation.accessibility_tree,
        "terminal": observation.terminal,
        "instruction": observation.instruction,
        "screenshot_format": observation.image_format,
        "screen_size": observation.screen_size,
    }


def to_json(fields: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(fields)
    except orjson.JSONEncodeError:
        # A guest's text may contain a lone surrogate, which JSON can only hold as an escape.
        return json.dumps(fields).encode()


async def screenshot_answer(screenshot: bytes, make_fields: Callable[[str], Mapping[str, Any]]) -> Response:
    """An answer of an API with its own field names: `make_fields` gets the screenshot in base64."""

    def write() -> bytes:
        return to_json(make_fields(base64.b64encode(screenshot).decode("ascii")))

    body = write() if len(screenshot) <= INLINE_BYTES else await asyncio.to_thread(write)
    return Response(body, media_type="application/json")


def json_answer(message: Message | Mapping[str, Any], *, status: int = 200) -> Response:
    """An answer without a screenshot."""
    body = message.model_dump_json() if isinstance(message, Message) else to_json(message)
    return Response(body, status_code=status, media_type="application/json")


def error_answer(
    sentence: str,
    fault: Fault,
    status: int,
    headers: Mapping[str, str] | None = None,
    *,
    num_person_inputs: int = 0,
) -> Response:
    given = {"num_person_inputs": num_person_inputs} if num_person_inputs else {}
    body = to_json(ErrorMessage(error=sentence, fault=fault, **given).model_dump(exclude_unset=True))
    return Response(body, status_code=status, headers=headers, media_type="application/json")
