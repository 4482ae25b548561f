"""Calls of Ray actors, and their address."""

import asyncio
import logging
from typing import Any

from osworld_pipeline.errors import PipelineError

log = logging.getLogger(__name__)

SLACK_S = 60.0
"""Extra time of a call for the round trip through Ray."""


class LostActorError(Exception):
    """An actor died or stopped responding."""


async def answer_of(call: Any, limit_s: float | None) -> Any:
    """The result of a call. Our own exceptions are raised again unchanged. `limit_s`: None waits as long as the actor
    runs.

    Raises:
        LostActorError: the actor died, or did not answer in time.
        RayTaskError: the call raised an exception that is not our own.
    """
    import ray
    from ray.exceptions import RayActorError, RayError, RayTaskError

    try:
        async with asyncio.timeout(limit_s):
            return await call
    except TimeoutError as error:
        raise LostActorError(f"it did not answer within {limit_s:.0f} s") from error
    except asyncio.CancelledError:
        ray.cancel(call)
        raise
    except RayTaskError as error:
        if isinstance(error.cause, PipelineError):
            raise error.cause from error
        raise
    except RayActorError as error:
        raise LostActorError(f"it died ({_first_line(error)})") from error
    except RayError as error:
        raise LostActorError(_first_line(error)) from error


async def ask_to_stop(actor: Any, method: str, *, limit_s: float) -> None:
    """Calls the method by which an actor ends what it runs. The caller kills the actor afterwards in any case, so a
    failure is only logged."""
    from ray.exceptions import RayTaskError

    try:
        await answer_of(getattr(actor, method).remote(), limit_s)
    except (LostActorError, PipelineError, RayTaskError) as error:
        log.warning("an actor did not %s: %s", method, error)


def node_address() -> str:
    """The IP address at which Ray's other nodes reach this process's node."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    return next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == here)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
