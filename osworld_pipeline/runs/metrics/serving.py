"""Serves the metrics of a program and of its rollout actors, if OSWORLD_METRICS asks for them."""

import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from osworld_pipeline.domain.remedies import how_to_set_up
from osworld_pipeline.errors import DependencyError, StoreError
from osworld_pipeline.process_files import metrics_target
from osworld_pipeline.runs.messages import Info, Message, Report, Warned
from osworld_pipeline.runs.shared_state import SharedState, state_of
from osworld_pipeline.wire.cross_site import is_loopback
from osworld_pipeline.wire.metrics_endpoint import PATH, MetricsAddress, metrics_address, metrics_server

if TYPE_CHECKING:
    from osworld_pipeline.runs.metrics.program_metrics import ProgramMetrics

log = logging.getLogger(__name__)

ACTOR = "rollout_actor"


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where a process serves its metrics. Picklable."""

    address: MetricsAddress
    state: SharedState | None
    """Gets a file that names the address; None without a state."""
    checkpoint: str = ""
    """The checkpoint that the program makes; empty if it makes none."""


class Current:
    """Of this process; None if it serves no metrics."""

    metrics: ClassVar["ProgramMetrics | None"] = None
    endpoint: ClassVar[Endpoint | None] = None


@contextmanager
def observed_program(program: str, job: Mapping[str, Any], report: Report) -> Iterator[Report]:
    """Serves the metrics of the program until the block ends, if OSWORLD_METRICS asks for them. Yields what the program
    reports to. Only rank 0 has metrics. If they cannot be served, a warning says why and the program runs without.

    Raises:
        MetricsSettingError: the setting is not valid.
    """
    address = metrics_address()
    if address is None or os.environ.get("RANK", "0") != "0":
        yield report
        return
    with ExitStack() as stack:
        try:
            endpoint = Endpoint(
                address=address,
                state=SharedState.of(state_of(job)) if "state_root" in job else None,
                checkpoint=str(job.get("checkpoint_id", "")),
            )
            target = stack.enter_context(_serving(program, endpoint))
        except (DependencyError, StoreError) as error:
            report(Warned(message=str(error)))
        else:
            report(Info(message=f"metrics: http://{target}{PATH}"))
        yield _observed_report(report)


@contextmanager
def observed_actor(endpoint: Endpoint | None, node_address: Callable[[], str]) -> Iterator[None]:
    """Serves the metrics of a rollout actor until the block ends. `endpoint`: from `endpoint_of_actors` in its program;
    `node_address`: of the actor's node, as other machines reach it."""
    with ExitStack() as stack:
        if endpoint is not None:
            host = endpoint.address.host
            reached_at = host if is_loopback(host) else node_address()
            there = replace(endpoint, address=replace(endpoint.address, reached_at=reached_at))
            try:
                stack.enter_context(_serving(ACTOR, there))
            except (DependencyError, StoreError) as error:
                log.warning("%s", error)
        yield


def endpoint_of_actors() -> Endpoint | None:
    """Each rollout actor serves at a free port of its node, from the configured range of ports if there is one; None if
    this program serves no metrics."""
    endpoint = Current.endpoint
    if endpoint is None:
        return None
    address = endpoint.address
    host = address.host if is_loopback(address.host) else "0.0.0.0"  # noqa: S104 - the token is required
    ports = address.ports if len(address.ports) > 1 else range(1)
    return replace(endpoint, address=replace(address, host=host, ports=ports))


@contextmanager
def _serving(name: str, endpoint: Endpoint) -> Iterator[str]:
    """Yields HOST:PORT. Raises DependencyError, StoreError: they cannot be served."""
    try:
        from osworld_pipeline.runs.metrics.program_metrics import ProgramMetrics
    except ImportError as error:
        raise DependencyError(
            f"no metrics are served: {error.name} is not installed: {how_to_set_up('train')}"
        ) from error
    metrics = ProgramMetrics(name, checkpoint=endpoint.checkpoint)
    with ExitStack() as stack:
        target = stack.enter_context(metrics_server(endpoint.address, metrics.text))
        if endpoint.state is not None:
            labels = {"program": name, "host": socket.gethostname()}
            stack.enter_context(metrics_target(endpoint.state.here().metrics_targets, name, target, labels))
        Current.metrics, Current.endpoint = metrics, endpoint
        try:
            yield target
        finally:
            Current.metrics = Current.endpoint = None


def _observed_report(report: Report) -> Report:
    metrics = Current.metrics
    if metrics is None:
        return report

    def observed(message: Message) -> None:
        metrics.on_message(message)
        report(message)

    return observed
