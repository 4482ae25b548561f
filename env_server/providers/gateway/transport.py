"""A guest's protocol over a sandbox client, as an httpx transport: the guest's client need not know where the guest is.

A call that the gateway refused without executing it is repeated until its time is up. A call that may have been
executed is repeated only if that does no harm, or if the gateway stores answers; otherwise it fails with
ReplicaError."""

import uuid
from collections.abc import Callable

import httpx

from env_server.providers.gateway.client import (
    Sandbox,
    SandboxAnswer,
    SandboxBusyError,
    SandboxClient,
    SandboxFailedError,
    SandboxGoneError,
    SandboxRefusedError,
    SandboxRequest,
)
from env_server.providers.gateway.retry_policy import RetryPolicy
from osworld_pipeline.errors import ReplicaError

DEFAULT_LIMIT_S = 30.0
SHORTEST_SHARE_S = 10.0
"""An attempt of a call that does no harm if it is repeated gets a third of the time left, but no less than this. An
attempt of any other call gets all of the time left, even if the gateway stores answers."""
REPEATABLE_POSTS = frozenset(
    {
        "/cursor_position", "/desktop_path", "/file", "/list_directory", "/screen_size", "/setup/change_wallpaper",
        "/setup/upload", "/wallpaper", "/window_size",
    }
)  # fmt: skip
"""Calls that only read, or that have the same effect however often they are executed. Calls that click, type or run a
program are not among them."""


class SandboxTransport(httpx.AsyncBaseTransport):
    """`find_sandbox` returns the current sandbox, or raises; `on_gone` is called when it is gone."""

    def __init__(
        self,
        client: SandboxClient,
        find_sandbox: Callable[[], Sandbox],
        *,
        retry_policy: RetryPolicy,
        on_gone: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._client, self._find_sandbox = client, find_sandbox
        self._retry_policy, self._on_gone = retry_policy, on_gone

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """
        Raises:
            ReplicaError: the guest did not answer within the request's time, its sandbox is gone, the gateway refused
                the request, or a retry might execute the call twice.
        """
        limit_s = request.extensions.get("timeout", {}).get("read") or DEFAULT_LIMIT_S
        call = SandboxRequest(
            method=request.method,
            path=request.url.path,
            query=request.url.query.decode("ascii"),
            content_type=request.headers.get("content-type", ""),
            body=await request.aread(),
            request_id="" if is_repeatable(request.method, request.url.path) else uuid.uuid4().hex,
        )
        answer = await self._ask(call, limit_s)
        headers = {"content-type": answer.content_type} if answer.content_type else {}
        return httpx.Response(answer.status, headers=headers, content=answer.body, request=request)

    async def _ask(self, call: SandboxRequest, limit_s: float) -> SandboxAnswer:
        retry_policy = self._retry_policy
        deadline, num_refused, num_failed = retry_policy.clock() + limit_s, 0, 0
        can_repeat = not call.request_id or self._client.keeps_answers
        while True:
            left_s = max(0.01, deadline - retry_policy.clock())
            try:
                share_s = left_s if call.request_id else min(left_s, max(SHORTEST_SHARE_S, left_s / 3))
                return await self._client.request(self._find_sandbox(), call, limit_s=share_s)
            except SandboxBusyError as error:
                # The call was not executed. While the gateway is busy only the deadline ends this loop.
                await retry_policy.wait(error, num_refused, deadline=deadline)
                num_refused += 1
            except SandboxFailedError as error:
                if error.may_have_happened and not can_repeat:
                    raise ReplicaError(
                        f"{error}; {call.path} may have been executed, so it is not sent again: replace the replica"
                    ) from error
                await retry_policy.wait(error, num_failed, deadline=deadline)
                num_failed += 1
            except SandboxGoneError as error:
                self._on_gone(str(error))
                raise
            except SandboxRefusedError as error:
                raise ReplicaError(str(error)) from error


def is_repeatable(method: str, path: str) -> bool:
    return method in ("GET", "HEAD") or path in REPEATABLE_POSTS
