"""Traces of episodes by OpenTelemetry, off unless OTEL_EXPORTER_OTLP_ENDPOINT (or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT)
names a collector. OpenTelemetry's own variables set everything else.

The trace of an episode has an id that follows from the episode's: rollout, env server, policy server and trainer
write to the same trace. Its context travels in the header `traceparent` (https://www.w3.org/TR/trace-context/).
"""

import functools
import hashlib
import importlib
import os
import platform
import time
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from osworld_pipeline.domain.remedies import how_to_set_up
from osworld_pipeline.errors import DependencyError

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PROPAGATED = ("traceparent", "tracestate")
EXPORT_INTERVAL_MS = 1000
"""Default of OTEL_BSP_SCHEDULE_DELAY."""
FLUSH_LIMIT_S = 5.0
"""Time that an actor waits for its collector before it ends."""
_service = ""
"""The name of this process in traces; empty unless it traces."""
_next_episode: ContextVar[str | None] = ContextVar("next_episode", default=None)
"""Set while the root span of an episode begins: the generator of ids reads it."""


def is_on() -> bool:
    return bool(_service)


def start_tracing(service: str) -> None:
    """Starts tracing in this process, if a collector is named; as `service`, unless OTEL_SERVICE_NAME is set. A process
    that does not call this never traces in any environment, so a program that only imports this library needs no
    packages for it.

    Raises:
        DependencyError: traces are asked for and the packages of the extra `tracing` are missing.
    """
    global _service
    if not any(os.environ.get(name) for name in ENDPOINTS):
        return
    try:
        importlib.import_module("opentelemetry.exporter.otlp.proto.http")
        importlib.import_module("opentelemetry.sdk.trace")
    except ImportError as error:
        raise DependencyError(
            f"{ENDPOINTS[0]} asks for traces, but {error.name} is not installed: {how_to_set_up('tracing')}"
        ) from error
    # Kept in a variable, not in the environment, because child processes would inherit it.
    _service = os.environ.get("OTEL_SERVICE_NAME") or service


def ids_of(episode_id: str) -> tuple[int, int]:
    """The ids of the trace, 128 bits, and of its root span, 64 bits. Neither is 0."""
    digest = hashlib.sha256(episode_id.encode()).digest()
    return int.from_bytes(digest[:16], "big") or 1, int.from_bytes(digest[16:24], "big") or 1


@contextmanager
def episode_span(episode_id: str, attributes: Mapping[str, Any]) -> Iterator[MutableMapping[str, Any]]:
    """The root span of an episode. Yields a mapping for attributes that are known at its end."""
    ending: dict[str, Any] = {}
    if not is_on():
        yield ending
        return
    from opentelemetry.context import Context

    token = _next_episode.set(episode_id)
    try:
        root = _tracer().start_span("episode", context=Context(), attributes=_known(attributes))
    finally:
        _next_episode.reset(token)
    from opentelemetry.trace import use_span

    with use_span(root, end_on_exit=True):
        try:
            yield ending
        finally:
            root.set_attributes(_known(ending))


def span(name: str, **attributes: Any) -> AbstractContextManager[Any]:
    """A part of what is being traced; nothing outside an episode. An exception is recorded in it."""
    if not is_on() or not _is_inside():
        return nullcontext()
    return _tracer().start_as_current_span(name, attributes=_known(attributes))


def add_past_span(name: str, seconds: float, **attributes: Any) -> None:
    """A part that has just ended and took `seconds`."""
    if is_on() and _is_inside():
        now = time.time_ns()
        part = _tracer().start_span(name, start_time=now - int(seconds * 1e9), attributes=_known(attributes))
        part.end(now)


def add_to_episodes(name: str, episode_ids: Iterable[str], *, started_at: float, attributes: Mapping[str, Any]) -> None:
    """The same span, which began at `started_at` (Unix seconds) and ends now, in the trace of each episode."""
    if not is_on():
        return
    now = time.time_ns()
    for episode_id in episode_ids:
        part = _tracer().start_span(
            name, context=_context_of(episode_id, name), start_time=int(started_at * 1e9), attributes=_known(attributes)
        )
        part.end(now)


async def send_context(request: Any) -> None:
    """A request hook of an httpx client: adds the current context to the headers."""
    if is_on() and _is_inside():
        from opentelemetry.propagate import inject

        inject(request.headers)


def served_span(name: str, headers: Mapping[bytes, bytes]) -> AbstractContextManager[Any]:
    """A server's span for a request whose client sent its context; None for other clients. `headers`: as in ASGI."""
    if not is_on() or b"traceparent" not in headers:
        return nullcontext()
    from opentelemetry.propagate import extract
    from opentelemetry.trace import SpanKind, get_current_span

    context = extract({name: headers.get(name.encode(), b"").decode("latin-1") for name in PROPAGATED})
    if not get_current_span(context).get_span_context().is_valid:
        return nullcontext()
    return _tracer().start_as_current_span(name, context=context, kind=SpanKind.SERVER)


def flush() -> None:
    """Sends what is recorded, within `FLUSH_LIMIT_S`; for processes that end without their exit handlers."""
    if is_on():
        _provider().force_flush(int(FLUSH_LIMIT_S * 1000))


def _is_inside() -> bool:
    from opentelemetry.trace import get_current_span

    return get_current_span().get_span_context().is_valid


def _known(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}


def _context_of(episode_id: str, name: str) -> Any:
    """Context of the episode's root span, sampled if the sampler samples the trace."""
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    trace_id, span_id = ids_of(episode_id)
    is_sampled = _provider().sampler.should_sample(None, trace_id, name).decision.is_sampled()
    flags = TraceFlags(TraceFlags.SAMPLED if is_sampled else TraceFlags.DEFAULT)
    return set_span_in_context(NonRecordingSpan(SpanContext(trace_id, span_id, is_remote=True, trace_flags=flags)))


def _tracer() -> Any:
    return _provider().get_tracer("osworld_pipeline")


@functools.cache
def _provider() -> Any:
    """Made on first use, so that a process that forks before has no thread of the exporter."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class EpisodeIds(RandomIdGenerator):
        def generate_trace_id(self) -> int:
            episode_id = _next_episode.get()
            return super().generate_trace_id() if episode_id is None else ids_of(episode_id)[0]

        def generate_span_id(self) -> int:
            episode_id = _next_episode.get()
            return super().generate_span_id() if episode_id is None else ids_of(episode_id)[1]

    here = {"service.name": _service, "host.name": platform.node(), "process.pid": os.getpid()}
    provider = TracerProvider(id_generator=EpisodeIds(), resource=Resource.create(here))
    delay_ms = float(os.environ.get("OTEL_BSP_SCHEDULE_DELAY") or EXPORT_INTERVAL_MS)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(), schedule_delay_millis=delay_ms))
    return provider
