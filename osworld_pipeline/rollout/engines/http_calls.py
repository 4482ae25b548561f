"""Calls to policy servers: JSON in both directions. Separates errors that a retry may fix from permanent ones.

The token is sent only in a header; error messages contain neither the token nor the user information of an address.
"""

import asyncio
import email.utils
import itertools
import random
import time
from collections.abc import AsyncIterable, Awaitable, Callable
from typing import Any, TypeVar
from urllib.request import getproxies

import httpx
import orjson

from osworld_pipeline.errors import EngineError
from osworld_pipeline.wire.http_pools import PooledTransport
from osworld_pipeline.wire.tracing import send_context

Result = TypeVar("Result")
CONNECT_TIMEOUT_S = 10.0
FIRST_WAIT_S = 0.4
MAX_WAIT_S = 20.0
MAX_RETRY_AFTER_S = 60.0
"""Upper limit of the wait that a server may request."""
BIG_BODY_BYTES = 64 * 1024
"""Bodies of at least this size are parsed in a thread."""
PASSING_STATUSES = (httpx.codes.REQUEST_TIMEOUT, httpx.codes.TOO_EARLY, httpx.codes.TOO_MANY_REQUESTS)


class TransientError(EngineError):
    """May succeed on another try, or on another server."""

    def __init__(self, message: str, *, retry_after_s: float | None = None, is_busy: bool = False) -> None:
        """`is_busy`: the server works and asks to be called later."""
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.is_busy = is_busy


class MissingError(EngineError):
    """The server does not have this address."""


class JsonClient:
    def __init__(self, *, token: str | None = None, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """`transport` replaces the network in tests."""
        self._token = token
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {token}"} if token else {},
            # With a proxy in the environment httpx chooses the transport of each address.
            transport=transport or (None if getproxies() else PooledTransport()),
            event_hooks={"request": [send_context]},
        )

    async def get(self, url: str, *, timeout_s: float, allow_missing: bool = False) -> dict[str, Any]:
        """Does the same as `post`. `allow_missing`: returns an empty result for an unknown address."""
        try:
            return await self._call("GET", url, None, timeout_s)
        except MissingError:
            if allow_missing:
                return {}
            raise

    async def post(self, url: str, body: bytes, *, timeout_s: float, wants_object: bool = True) -> dict[str, Any]:
        """`wants_object`: False for an address with any kind of answer, which is then ignored.

        Raises:
            TransientError: no complete answer, one that is not a JSON object, or status 408, 425, 429 or 5xx.
            EngineError: the server refused the request permanently.
        """
        return await self._call("POST", url, body, timeout_s, wants_object=wants_object)

    async def put(self, url: str, body: AsyncIterable[bytes], *, timeout_s: float) -> dict[str, Any]:
        """Does the same as `post`, for a body of any size."""
        return await self._call("PUT", url, body, timeout_s)

    async def close(self) -> None:
        await self._http.aclose()

    async def _call(
        self,
        method: str,
        url: str,
        body: bytes | AsyncIterable[bytes] | None,
        timeout_s: float,
        *,
        wants_object: bool = True,
    ) -> dict[str, Any]:
        where = shown(url)
        timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S))
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._http.request(
                    method, url, content=body, headers={"Content-Type": "application/json"}, timeout=timeout
                )
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise TransientError(f"no server answers at {where}: is the policy server running?") from error
        except (httpx.TimeoutException, TimeoutError) as error:
            raise TransientError(f"{where} did not answer within {timeout_s:.3g} s") from error
        except httpx.TransportError as error:
            reason = self._clean(str(error) or type(error).__name__)
            raise TransientError(f"the connection to {where} broke: {reason}") from error
        except (httpx.InvalidURL, RuntimeError) as error:
            # RuntimeError: the client was closed in the meantime.
            raise EngineError(f"{where} cannot be called: {self._clean(str(error))}") from error
        if len(response.content) < BIG_BODY_BYTES:
            answer = _json_object(response.content)
        else:
            answer = await asyncio.to_thread(_json_object, response.content)
        if not response.is_success:
            raise self._refusal(where, response, answer)
        if answer is None and not wants_object:
            return {}
        if answer is None:
            raise TransientError(f"{where} did not answer with a JSON object: is it a policy server?")
        return answer

    def _refusal(self, where: str, response: httpx.Response, answer: dict[str, Any] | None) -> EngineError:
        status = response.status_code
        sentence = self._clean(_sentence(answer) or response.reason_phrase or "no reason given")
        if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            return EngineError(
                f"{where} refused the token ({status}): set ENGINE_TOKEN, or `token` of the resource `engine`, to the "
                "server's token"
            )
        message = f"{where} answered {status}: {sentence}"
        if status in PASSING_STATUSES or status >= httpx.codes.INTERNAL_SERVER_ERROR:
            is_busy = status == httpx.codes.TOO_MANY_REQUESTS
            return TransientError(message, retry_after_s=_retry_after_s(response), is_busy=is_busy)
        if status in (httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED):
            return MissingError(message)
        return EngineError(message)

    def _clean(self, sentence: str) -> str:
        """One line without the token, because servers may repeat what they refused."""
        if self._token:
            sentence = sentence.replace(self._token, "***")
        return " ".join(sentence.split())[:500]


async def within_budget(attempt: Callable[[float], Awaitable[Result]], *, timeout_s: float, budget_s: float) -> Result:
    """Returns the result of the first attempt that succeeds. Each attempt receives its time limit in seconds. Retries
    start only within `budget_s`, after a wait that grows with full jitter or that the server requested.

    Raises:
        EngineError: an attempt failed permanently; or the budget is spent, and the message has the number of tries.
    """
    start = time.monotonic()
    for num_tries in itertools.count(1):
        left_s = start + max(timeout_s, budget_s) - time.monotonic()
        try:
            return await attempt(min(timeout_s, left_s))
        except TransientError as error:
            wait_s = _wait_s(num_tries, error.retry_after_s)
            spent_s = time.monotonic() - start
            if spent_s + wait_s >= budget_s:
                tries = "1 try" if num_tries == 1 else f"{num_tries} tries"
                raise EngineError(f"{error} (given up after {tries} in {spent_s:.1f} s)") from error
            await asyncio.sleep(wait_s)
    raise AssertionError("unreachable: the loop above has no end")


def shown(url: str) -> str:
    """An address for display: without user or password."""
    scheme, separator, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path.partition('?')[0]}"


def _wait_s(num_tries: int, retry_after_s: float | None) -> float:
    if retry_after_s is not None:
        # At least the requested wait; the jitter keeps the episodes of a group from retrying simultaneously.
        return retry_after_s * random.uniform(1.0, 1.25)
    return random.uniform(0.0, min(MAX_WAIT_S, FIRST_WAIT_S * 2 ** min(num_tries - 1, 10)))


def _retry_after_s(response: httpx.Response) -> float | None:
    """Seconds to wait by the Retry-After header, which is a number of seconds or a date; None if it is neither."""
    value = response.headers.get("Retry-After", "")
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError):
            return None
    return min(MAX_RETRY_AFTER_S, max(0.0, seconds))


def _sentence(answer: dict[str, Any] | None) -> str:
    """The error message of a server: {"error": {"message"}}, {"error"}, {"message"}, {"error_message"} or
    {"detail"}."""
    for key in ("error", "message", "error_message", "detail"):
        value = (answer or {}).get(key)
        if isinstance(value, dict):
            value = value.get("message")
        if value:
            return str(value)
    return ""


def _json_object(content: bytes) -> dict[str, Any] | None:
    try:
        value = orjson.loads(content)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
