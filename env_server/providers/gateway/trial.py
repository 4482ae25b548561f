"""Starts and stops one sandbox at a gateway, which tests its address, its token and its guests together."""

import asyncio
import time
import uuid

from env_server.providers.gateway.client import (
    Sandbox,
    SandboxBusyError,
    SandboxClient,
    SandboxFailedError,
    SandboxRequest,
)
from osworld_pipeline.errors import ReplicaError

TRIAL_LIMIT_S = 60.0
"""Time from the request for a sandbox to its guest's first answer."""
STOP_LIMIT_S = 20.0
POLL_S = 0.5


async def try_gateway(client: SandboxClient, *, limit_s: float = TRIAL_LIMIT_S) -> str:
    """Returns the result as text; closes the client.

    Raises:
        DependencyError: the gateway refuses permanently.
        ReplicaError: it fails, or does not answer.
    """
    began = time.monotonic()
    try:
        async with asyncio.timeout(limit_s):
            sandbox = await client.start(uuid.uuid4().hex, limit_s=limit_s)
            try:
                await _wait_for_guest(client, sandbox, limit_s)
            finally:
                await asyncio.shield(client.stop(sandbox, limit_s=STOP_LIMIT_S))
        return f"a sandbox started there and its guest answered in {time.monotonic() - began:.1f} s"
    except SandboxBusyError as error:
        return f"it answers, but has no free sandbox now ({error})"
    except TimeoutError as error:
        raise ReplicaError(
            f"no guest of a sandbox answered within {limit_s:g} s; check the log of the gateway"
        ) from error
    finally:
        await client.close()


async def _wait_for_guest(client: SandboxClient, sandbox: Sandbox, limit_s: float) -> None:
    while True:
        try:
            request = SandboxRequest(method="GET", path="/platform")
            answer = await client.request(sandbox, request, limit_s=limit_s)
            if answer.status == 200:
                return
        except (SandboxBusyError, SandboxFailedError):
            pass  # it is still booting, or the gateway failed briefly
        await asyncio.sleep(POLL_S)
