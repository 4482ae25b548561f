"""Maps an env server's answers to results and errors; a failure is mapped by its `fault` if it names one."""

import asyncio
import base64
import binascii
import json
from typing import Any, TypeVar

import httpx

from osworld_pipeline.domain.observation import Observation
from osworld_pipeline.domain.shown_commands import ENV_SERVER, shell_line
from osworld_pipeline.errors import (
    ActionParseError,
    EnvServerError,
    EvaluatorError,
    NoCapacityError,
    PipelineError,
    ReplicaError,
    TaskError,
    TokenEndedError,
    TouchedError,
)
from osworld_pipeline.wire import Message, ObservationMessage
from osworld_pipeline.wire.faults import error_class_of
from osworld_pipeline.wire.run_tokens import ENDED

Answer = TypeVar("Answer", bound=Message)
BIG_ANSWER_BYTES = 64 * 1024
"""Larger answers are read in a thread: JSON and base64 of a screenshot would block the event loop."""


class LostAnswerError(Exception):
    """It is unknown whether the call was executed; `meaning` is the error to raise if it is not sent again."""

    def __init__(self, meaning: PipelineError) -> None:
        super().__init__(str(meaning))
        self.meaning = meaning


class UnreachableError(EnvServerError):
    """No server listens there (yet)."""


class BusyError(NoCapacityError):
    """No free replica at present; `retry_after_s` is the server's own estimate."""

    def __init__(self, message: str, *, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def unreachable(base_url: str) -> str:
    port = httpx.URL(base_url).port
    words = ["--provider", "local", *(["--port", port] if port else [])]
    return f"no env server answers at {base_url}; start one with: {shell_line(ENV_SERVER, *words)}"


def read_answer(answer: type[Answer], content: bytes, path: str) -> Answer:
    if path == "/evaluate":
        # Slime's own server reports a crashed evaluator as reward 0.0 with an `error`.
        problem = json_object(content).get("error")
        if problem:
            raise EvaluatorError(f"the evaluator crashed: {problem}")
    return answer.model_validate_json(content)


async def read_observation(message: ObservationMessage) -> Observation:
    encoded = message.screenshot_base64
    try:
        if len(encoded) < BIG_ANSWER_BYTES:
            screenshot = base64.b64decode(encoded, validate=True)
        else:
            screenshot = await asyncio.to_thread(base64.b64decode, encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ReplicaError("the env server sent a screenshot that is not base64") from error
    return Observation(
        screenshot=screenshot,
        image_format=message.screenshot_format,
        accessibility_tree=message.accessibility_tree,
        terminal=message.terminal,
        instruction=message.instruction,
        screen_size=message.screen_size,
    )


def error_of(path: str, base_url: str, response: httpx.Response) -> PipelineError:
    """The error for a failed answer: by its `fault` if it names one, else by status and path."""
    body = json_object(response.content)
    sentence = str(body.get("error") or body.get("detail") or response.reason_phrase or "no reason given")[:2000]
    where = f"{base_url}{path}"
    status = response.status_code
    if status == httpx.codes.SERVICE_UNAVAILABLE or body.get("fault") == "no_capacity":
        return BusyError(f"{where} has no free replica: {sentence}", retry_after_s=_retry_after_s(response))
    if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        if sentence.startswith(ENDED):
            return TokenEndedError(f"{where}: {sentence}")
        return EnvServerError(
            f"{where} refused the token: set ENV_SERVER_TOKEN to the one the server was started with; a server of an "
            "older version also needs desktops.token_hours = 0"
        )
    if status == httpx.codes.NOT_FOUND and path != "/reset":
        return ReplicaError(f"{where}: {sentence}")
    fault = body.get("fault")
    if status >= httpx.codes.INTERNAL_SERVER_ERROR:
        default = EvaluatorError if path == "/evaluate" and fault is None else ReplicaError
        kind = error_class_of(fault, default)
        return TouchedError(sentence, _num_inputs(body)) if kind is TouchedError else kind(sentence)
    if path == "/step" and status == httpx.codes.BAD_REQUEST:
        return ActionParseError(sentence)
    if path == "/reset" and status in (httpx.codes.BAD_REQUEST, httpx.codes.UNPROCESSABLE_ENTITY):
        return TaskError(f"the env server at {base_url} refused the task: {sentence}")
    return EnvServerError(f"{where} answered {status}: {sentence}")


def _num_inputs(body: dict[str, Any]) -> int:
    found = body.get("num_person_inputs")
    return found if isinstance(found, int) and found > 0 else 1


def _retry_after_s(response: httpx.Response) -> float | None:
    try:
        return min(60.0, max(0.1, float(response.headers.get("Retry-After", ""))))
    except ValueError:
        return None


def json_object(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
