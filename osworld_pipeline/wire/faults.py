"""The classification of errors, for all sides: the fault and the status in a server's answer, the client's error for a
fault, and the outcome of the episode that an error ends."""

from collections.abc import Mapping
from dataclasses import dataclass

from osworld_pipeline.domain.episode import Outcome
from osworld_pipeline.errors import (
    ActionParseError,
    EngineError,
    EnvServerError,
    EvaluatorError,
    NoCapacityError,
    PipelineError,
    ReplicaError,
    SetupError,
    TamperingError,
    TaskError,
    TouchedError,
)
from osworld_pipeline.wire import Fault


@dataclass(frozen=True)
class Classified:
    fault: Fault
    status: int
    """Status of the HTTP answer."""
    outcome: Outcome | None = None
    """Outcome of the episode that the error ends; None if it ends none."""


CLASSIFIED: Mapping[type[PipelineError], Classified] = {
    TamperingError: Classified("tampering", 500, Outcome.TAMPERING),
    TouchedError: Classified("touched", 500, Outcome.TOUCHED),
    EvaluatorError: Classified("grader_fault", 500, Outcome.GRADER_FAULT),
    EngineError: Classified("policy_fault", 500, Outcome.POLICY_FAULT),
    ReplicaError: Classified("env_fault", 500, Outcome.ENV_FAULT),
    SetupError: Classified("env_fault", 500, Outcome.ENV_FAULT),
    NoCapacityError: Classified("no_capacity", 503, Outcome.ENV_FAULT),
    EnvServerError: Classified("env_fault", 500, Outcome.ENV_FAULT),
    TaskError: Classified("client_error", 422, Outcome.ENV_FAULT),
    ActionParseError: Classified("client_error", 400),
    PipelineError: Classified("env_fault", 500),
}
"""An error has the entry of its nearest base class."""
END_AN_EPISODE = tuple(kind for kind, found in CLASSIFIED.items() if found.outcome is not None)


def classify(error: PipelineError, table: Mapping[type[PipelineError], Classified] = CLASSIFIED) -> Classified:
    return next(table[kind] for kind in type(error).__mro__ if kind in table)


def outcome_of(error: PipelineError) -> Outcome:
    """The outcome of the episode that this error of END_AN_EPISODE ends."""
    outcome = classify(error).outcome
    assert outcome is not None, f"{type(error).__name__} ends no episode"
    return outcome


def error_class_of(fault: str | None, default: type[PipelineError]) -> type[PipelineError]:
    """The client's error for a fault; `default` for env_fault, client_error, no_capacity, unknown faults and None."""
    if fault in ("env_fault", "client_error", "no_capacity"):
        return default
    return next((kind for kind, found in CLASSIFIED.items() if found.fault == fault), default)
