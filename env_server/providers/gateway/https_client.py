"""The reference client: sandboxes over plain HTTPS, with the token and the session in headers. Its other side is
`env_server.gateway_server`, whose docstring lists the calls."""

import asyncio
import json
import math
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from env_server.providers.gateway.client import (
    ClientOptions,
    Sandbox,
    SandboxAnswer,
    SandboxBusyError,
    SandboxFailedError,
    SandboxGoneError,
    SandboxRefusedError,
    SandboxRequest,
)
from osworld_pipeline.wire.cross_site import is_loopback

CONNECT_LIMIT_S = 10.0
SESSION_HEADER = "X-Sandbox-Session"
REQUEST_HEADER = "Idempotency-Key"
ORIGIN_HEADER = "X-Answered-By"
"""`guest` marks the guest's own answer; an error without this header is the gateway's."""
_BUSY = (429, 503)
_REFUSED = (400, 401, 403, 404, 405, 413, 415, 422)


class HttpsSandboxClient:
    """`transport` replaces the network in tests."""

    keeps_answers = True

    def __init__(self, options: ClientOptions, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """
        Raises:
            ValueError: the address is not a web address, has a user or a query, or is http:// and not loopback, even
                without a token; or the certificates cannot be read.
        """
        parts = urlsplit(options.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise ValueError("the gateway's address must be https://HOST[:PORT][/PATH], without a user or a query")
        if parts.scheme == "http" and not is_loopback(parts.hostname):
            raise ValueError(f"the token would be sent to {parts.hostname} unencrypted; use https://")
        self._name = f"the gateway {parts.scheme}://{parts.netloc}"
        if transport is None:
            verify = _certificates(options) if parts.scheme == "https" else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
            transport = httpx.AsyncHTTPTransport(verify=verify, limits=limits)
        self._http = httpx.AsyncClient(
            base_url=options.url.rstrip("/"),
            headers={"Authorization": f"Bearer {options.token}"} if options.token else {},
            transport=transport,
            trust_env=False,
            follow_redirects=False,  # the token must not be sent to another host
        )

    async def start(self, request_id: str, *, limit_s: float) -> Sandbox:
        answer = await self._send("POST", "/v1/sandboxes", limit_s=limit_s, headers={REQUEST_HEADER: request_id})
        return self._sandbox(self._fields(answer))

    async def stop(self, sandbox: Sandbox, *, limit_s: float) -> None:
        try:
            await self._send("DELETE", _path(sandbox), limit_s=limit_s, headers=_session(sandbox))
        except SandboxGoneError:
            return

    async def refresh(self, sandbox: Sandbox, *, limit_s: float) -> Sandbox:
        answer = await self._send("POST", f"{_path(sandbox)}/session", limit_s=limit_s, headers=_session(sandbox))
        return self._sandbox(self._fields(answer))

    async def request(self, sandbox: Sandbox, request: SandboxRequest, *, limit_s: float) -> SandboxAnswer:
        headers = _session(sandbox)
        if request.content_type:
            headers["Content-Type"] = request.content_type
        if request.request_id:
            headers[REQUEST_HEADER] = request.request_id
        path = f"{_path(sandbox)}/guest{quote(request.path)}" + (f"?{request.query}" if request.query else "")
        answer = await self._send(request.method, path, limit_s=limit_s, headers=headers, body=request.body)
        if answer.headers.get(ORIGIN_HEADER) != "guest":
            raise SandboxRefusedError(
                f"{self._name} answered {request.path} itself instead of its guest; is it a gateway of this kind?"
            )
        kind = answer.headers.get("content-type", "")
        return SandboxAnswer(status=answer.status_code, content_type=kind, body=answer.content)

    async def close(self) -> None:
        await self._http.aclose()

    async def _send(
        self, method: str, path: str, *, limit_s: float, headers: Mapping[str, str], body: bytes = b""
    ) -> httpx.Response:
        """The answer if it is the guest's, or a success of the gateway; otherwise raises an error."""
        call = f"{method} {path.partition('?')[0]}"
        try:
            async with asyncio.timeout(limit_s):
                timeout = httpx.Timeout(limit_s, connect=min(limit_s, CONNECT_LIMIT_S))
                answer = await self._http.request(method, path, headers=headers, content=body, timeout=timeout)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            reason = str(error) or type(error).__name__
            raise SandboxFailedError(
                f"{self._name} cannot be reached for {call} ({reason})", may_have_happened=False
            ) from error
        except (TimeoutError, httpx.TimeoutException) as error:
            raise SandboxFailedError(f"{self._name} did not answer {call} within {limit_s:.3g} s") from error
        except httpx.HTTPError as error:
            raise SandboxFailedError(
                f"the connection to {self._name} was lost in {call} ({type(error).__name__})"
            ) from error
        if answer.status_code < 300 or answer.headers.get(ORIGIN_HEADER) == "guest":
            return answer
        raise self._error(call, answer)

    def _error(self, call: str, answer: httpx.Response) -> Exception:
        status, text = answer.status_code, f"{self._name} answered {call} with {answer.status_code}: {_message(answer)}"
        is_of_sandbox = "/v1/sandboxes/" in call
        retry_after_s = _retry_after_s(answer.headers.get("retry-after"))
        if status == 429 or (status in _BUSY and retry_after_s is not None):
            return SandboxBusyError(text, retry_after_s=retry_after_s)
        if status == 410 or (status == 404 and is_of_sandbox):
            return SandboxGoneError(text)
        if status in _REFUSED:
            return SandboxRefusedError(f"{text}; check --gateway-url and the token")
        return SandboxFailedError(text)

    def _fields(self, answer: httpx.Response) -> dict[str, Any]:
        try:
            fields = answer.json()
        except (json.JSONDecodeError, UnicodeDecodeError):
            fields = None
        if not isinstance(fields, dict):
            raise SandboxRefusedError(f"{self._name} did not answer with a JSON object; is it a gateway of this kind?")
        return fields

    def _sandbox(self, fields: Mapping[str, Any]) -> Sandbox:
        try:
            lifetime_s = fields.get("lifetime_s")
            return Sandbox(
                sandbox_id=str(fields["sandbox_id"]),
                session_id=str(fields["session_id"]),
                lifetime_s=None if lifetime_s is None else float(lifetime_s),
                image_digest=str(fields.get("image_digest") or ""),
                details=str(fields.get("details") or ""),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise SandboxRefusedError(
                f"{self._name} returned an invalid sandbox ({type(error).__name__}: {error}); is it a gateway of this "
                "kind?"
            ) from error


def _certificates(options: ClientOptions) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=None if options.ca_file is None else str(options.ca_file))
    except OSError as error:
        raise ValueError(f"the certificates {options.ca_file} cannot be read: {error.strerror or error}") from error


def _path(sandbox: Sandbox) -> str:
    return f"/v1/sandboxes/{quote(sandbox.sandbox_id, safe='')}"


def _session(sandbox: Sandbox) -> dict[str, str]:
    return {SESSION_HEADER: sandbox.session_id}


def _retry_after_s(text: str | None) -> float | None:
    """Seconds; a date, which needs synchronised clocks, is ignored."""
    try:
        seconds = float(text) if text is not None else math.nan
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


def _message(answer: httpx.Response) -> str:
    try:
        fields = answer.json()
    except (json.JSONDecodeError, UnicodeDecodeError):
        return answer.text[:300]
    return str(fields.get("error", fields))[:300] if isinstance(fields, dict) else str(fields)[:300]
