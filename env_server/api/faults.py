"""The HTTP status and the fault of the answer for each error. A fault is reported and never becomes a reward."""

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from env_server.api.answers import error_answer
from env_server.episodes.outcomes import RecordingError, StepOrderError
from env_server.episodes.person import PersonInputError
from env_server.episodes.table import ScreenSizeError, UnknownEpisodeError
from osworld_pipeline.errors import PipelineError, TouchedError
from osworld_pipeline.wire import ErrorMessage, Fault
from osworld_pipeline.wire.faults import CLASSIFIED, Classified, classify

ANSWERS: Mapping[type[PipelineError], Classified] = {
    **CLASSIFIED,
    UnknownEpisodeError: Classified("client_error", 404),
    ScreenSizeError: Classified("client_error", 409),
    RecordingError: Classified("client_error", 409),
    StepOrderError: Classified("client_error", 409),
    PersonInputError: Classified("client_error", 409),
}


def add_fault_answers(
    app: FastAPI, *, retry_after_s: Callable[[], int], on_fault: Callable[[Fault], None] = lambda _: None
) -> None:
    """`on_fault` is called for every answer that names a fault."""

    def answer_with(
        sentence: str, fault: Fault, status: int, headers: Mapping[str, str] | None = None, num_inputs: int = 0
    ) -> Response:
        on_fault(fault)
        return error_answer(sentence, fault, status, headers, num_person_inputs=num_inputs)

    async def answer_known(_: Request, error: Exception) -> Response:
        assert isinstance(error, PipelineError)
        found = classify(error, ANSWERS)
        headers = {"Retry-After": str(retry_after_s())} if found.status == 503 else None
        num_inputs = error.num_inputs if isinstance(error, TouchedError) else 0
        return answer_with(str(error), found.fault, found.status, headers, num_inputs)

    async def answer_invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return answer_with(f"the request is not valid at {where}: {first['msg']}", "client_error", 422)

    async def answer_http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        fault: Fault = "no_capacity" if error.status_code == 503 else "env_fault"
        fault = "client_error" if error.status_code < 500 else fault
        return answer_with(str(error.detail), fault, error.status_code, dict(error.headers or {}))

    async def answer_bug(_: Request, error: Exception) -> Response:
        return answer_with(
            f"the env server failed with {type(error).__name__}; its log has the traceback", "env_fault", 500
        )

    for kind in ANSWERS:
        app.add_exception_handler(kind, answer_known)
    app.add_exception_handler(RequestValidationError, answer_invalid)
    app.add_exception_handler(HTTPException, answer_http)
    app.add_exception_handler(Exception, answer_bug)


_TOLD: dict[str, Any] = {"model": ErrorMessage}
_TOLD_TOO: dict[str, Any] = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorMessage"}}}}
"""The model is referred to by its name: a model for each status of each route would take most of the application's
start-up time."""
ERROR_ANSWERS: dict[int | str, dict[str, Any]] = {
    status: {"description": description, **(_TOLD if status == 500 else _TOLD_TOO)}
    for status, description in {
        400: "The action is refused; nothing was executed.",
        401: "The token is missing or wrong.",
        403: "The token of a run does not allow this; or the server has no token, and the request was not sent to a "
        "loopback address by a program on this machine.",
        404: "There is no such live episode or replica; the message says why it is gone.",
        408: "The request did not arrive in time.",
        409: "It contradicts the server's state: a step number out of order, another screen size, a person's input "
        "that is not allowed.",
        413: "The body is too large.",
        415: "The Content-Type of the body is not JSON.",
        422: "The body, or the task in it, is not valid.",
        500: "A fault of the desktop (env_fault) or of the grader (grader_fault), never a reward; or the policy made "
        "its desktop unusable (tampering), which is a failure; or a person sent input to it (touched), so there is no "
        "reward of the policy.",
        503: "No desktop became free in time, or the server is draining; Retry-After says when to retry.",
    }.items()
}
"""The error answers in the documentation of routes."""
