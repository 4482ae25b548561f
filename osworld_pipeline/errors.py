"""One error class per boundary; each message names what failed, where, and the remedy.

PipelineError
├── DependencyError      a program, package, kernel feature or disk space is missing
├── RecipeError          a recipe or another configuration is invalid; also a ValueError
├── TaskError            a task that cannot be run: malformed, or without an evaluator
├── DatasetError         a source, demonstration, import, export or evaluation suite that is invalid or missing
├── TableError           a table or the DuckDB catalog: damaged, locked or absent; or a bad query
├── StoreError           trajectory parts, image blobs, checkpoints: cannot be written or read
│   └── StoreBusyError   another process holds an exclusive operation
├── ActionParseError     text that is not an action
├── EnvServerError       the env server is unreachable or sent an invalid response
│   └── NoCapacityError  it had no free replica within the time limit
├── TokenEndedError      the token of a run has expired: ends the program, not an episode
├── ReplicaError         a desktop died, or its guest agent stopped responding -> env_fault
│   ├── TamperingError   the policy disabled it, or interfered with grading    -> tampering
│   └── TouchedError     a person sent input to it                             -> touched
├── SetupError           a task's config could not be executed                 -> env_fault
├── EngineError          the policy engine failed or timed out                 -> policy_fault
├── EvaluatorError       a grader crashed; not a reward of zero                -> grader_fault
├── TrainingError        a run that must stop (loss not finite, log-probabilities differ)
├── TrackingError        MLflow is unreachable, refused, or lacks the requested object
└── InternalError        an exception that this project does not expect: a defect
"""

from typing import ClassVar


class PipelineError(Exception):
    """Base of every error this project raises on purpose."""

    is_retryable: ClassVar[bool] = False
    """Whether the same work may succeed when it is started again, without a change by a person."""


class DependencyError(PipelineError): ...


class RecipeError(PipelineError, ValueError): ...


class TaskError(PipelineError): ...


class DatasetError(PipelineError): ...


class TableError(PipelineError): ...


class StoreError(PipelineError): ...


class StoreBusyError(StoreError):
    is_retryable = True


class ActionParseError(PipelineError): ...


class EnvServerError(PipelineError):
    is_retryable = True


class NoCapacityError(EnvServerError): ...


class TokenEndedError(PipelineError):
    """Ends the program and no episode: with a new token it resumes."""

    is_retryable = True


class ReplicaError(PipelineError):
    is_retryable = True


class TamperingError(ReplicaError): ...


class TouchedError(ReplicaError):
    def __init__(self, message: str, num_inputs: int = 1) -> None:
        """`num_inputs`: minimum number of inputs that the person sent."""
        super().__init__(message)
        self.num_inputs = num_inputs


class SetupError(PipelineError): ...


class EngineError(PipelineError):
    is_retryable = True


class EvaluatorError(PipelineError): ...


class TrainingError(PipelineError): ...


class TrackingError(PipelineError):
    is_retryable = True


class InternalError(PipelineError): ...
