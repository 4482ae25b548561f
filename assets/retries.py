"""Retries of the steps that depend on desktops, servers or other processes: only after faults that may pass."""

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import dagster as dg

from osworld_pipeline.errors import PipelineError

FAULT_RETRIES = dg.RetryPolicy(
    max_retries=2, delay=30, backoff=dg.Backoff.EXPONENTIAL, jitter=dg.Jitter.PLUS_MINUS
)  # after about 30 and 90 seconds
MAX_RETRIES_TAG = "dagster/max_retries"
"""Dagster's tag: how many times it restarts a run whose process was lost. With 0, steps are not repeated either,
because a person waits for such a run."""

Context = TypeVar("Context", dg.OpExecutionContext, dg.AssetExecutionContext)
P = ParamSpec("P")
R = TypeVar("R")


def only_after_faults(
    step: Callable[Concatenate[Context, P], R],
) -> Callable[Concatenate[Context, P], R]:
    """A decorator for a step with FAULT_RETRIES; without it, Dagster would repeat the step after every exception. The
    failure of a PipelineError contains only its message, and the step is repeated only if that error is retryable."""

    @functools.wraps(step)
    def guarded(context: Context, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return step(context, *args, **kwargs)
        except dg.Failure as failure:
            failure.allow_retries = failure.allow_retries and _may_repeat(context)
            raise
        except Exception as error:
            is_retryable = isinstance(error, PipelineError) and error.is_retryable
            message = str(error) if isinstance(error, PipelineError) else f"{type(error).__name__}: {error}"
            raise dg.Failure(message, allow_retries=is_retryable and _may_repeat(context)) from error

    return guarded


def _may_repeat(context: dg.OpExecutionContext | dg.AssetExecutionContext) -> bool:
    return context.run.tags.get(MAX_RETRIES_TAG) != "0"
