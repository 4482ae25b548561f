"""A FastAPI route that is documented by its signature, like any other route, but answered without FastAPI's dependency
handling, which would take more time in every step than the rest of the server."""

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, get_type_hints

from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.types import Receive, Scope, Send

from env_server.api.answers import json_answer
from osworld_pipeline.wire import Message

Kind = TypeVar("Kind", bound=Message)


class QuickRoute(APIRoute):
    """A route for endpoints whose only parameters are path parameters (as text), `message` (the JSON body) and
    `request`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint = self.endpoint
        hints = get_type_hints(endpoint)
        kind: type[Message] | None = hints.pop("message", None)
        hints.pop("return", None)
        takes_request = hints.pop("request", None) is not None
        assert set(hints) == set(self.param_convertors), f"{self.path} has parameters that a quick route lacks: {hints}"

        async def answer_to(request: Request) -> Response:
            arguments: dict[str, Any] = dict(request.path_params)
            if kind is not None:
                arguments["message"] = await read_message(request, kind)
            if takes_request:
                arguments["request"] = request
            answer = await endpoint(**arguments)
            return answer if isinstance(answer, Response) else json_answer(answer)

        self._answer_to = answer_to
        return answer_to

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Errors of the endpoint are answered by the handlers of the application, one layer further out."""
        if scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)
            return
        response = await self._answer_to(Request(scope, receive, send))
        await response(scope, receive, send)


async def read_message(request: Request, kind: type[Kind]) -> Kind:
    """
    Raises:
        HTTPException: 415, the Content-Type is not JSON. A web page of another site can send some other types to a
            server on this machine without a preflight request.
        RequestValidationError: the body is not a valid message.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise HTTPException(415, "the body must be JSON; send Content-Type: application/json")
    try:
        return kind.model_validate_json(await request.body())
    except ValidationError as error:
        raise RequestValidationError(
            [
                {**found, "loc": ("body", *found["loc"])}
                for found in error.errors(include_url=False, include_context=False)
            ]
        ) from error
