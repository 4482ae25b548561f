"""The result of a step, the end of an episode, and the errors of requests that an episode refuses."""

from dataclasses import dataclass
from typing import Literal

from osworld_pipeline.domain.observation import Observation
from osworld_pipeline.errors import EnvServerError

EpisodeOutcome = Literal[
    "evaluated", "closed", "idle", "client_gone", "shutdown", "env_fault", "grader_fault", "tampering", "touched"
]
"""How an episode ended for the server, exactly one per episode. `closed` is a client's close without an evaluation,
`touched` any end after a person's input."""


class RecordingError(EnvServerError):
    """The desktop cannot record, records already, or has recorded nothing."""


class StepOrderError(EnvServerError):
    """A step number that is neither the last nor the next, or the last number with another action."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    observation: Observation
    num_steps: int
    """Including this one; refused actions do not count."""
    action: str
    num_person_inputs: int = 0
    """Inputs that a person had sent to the desktop by then."""
    is_repeated: bool = False
    """The step had been executed before and its answer was lost: this is the same answer again."""

    @property
    def is_done(self) -> bool:
        return self.action in ("DONE", "FAIL")
