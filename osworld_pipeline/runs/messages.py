"""The messages of a running program to the side that started it. They travel as JSON lines."""

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from osworld_pipeline.errors import PipelineError


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    def to_line(self) -> str:
        """The message as JSON. Pydantic's own JSON refuses text with parts of file names that are not UTF-8."""
        return json.dumps(self.model_dump())


class Started(_Message):
    """The program, or its rank 0, runs: the resources that it waited for are allocated."""

    kind: Literal["started"] = "started"


class Waiting(_Message):
    """The program's process runs, and waits for more machines before it starts."""

    kind: Literal["waiting"] = "waiting"
    resources: str
    has_limit: bool = False
    """Whether the program itself limits this wait."""


class Progress(_Message):
    kind: Literal["progress"] = "progress"
    done: int
    total: int
    note: str = ""
    stage: str = ""
    """The name of its bar; empty for the stage that the program runs."""


class Info(_Message):
    kind: Literal["info"] = "info"
    message: str


class Warned(_Message):
    kind: Literal["warning"] = "warning"
    message: str


class Metrics(_Message):
    kind: Literal["metrics"] = "metrics"
    update: int
    """Counted from 1; 0 for the rollouts before a round's training."""
    metrics: Mapping[str, float]


class Result(_Message):
    """The last message of a program that succeeded."""

    kind: Literal["result"] = "result"
    result: dict[str, Any]


class Failed(_Message):
    """The last message of a program that failed, or of the rank that failed first."""

    kind: Literal["error"] = "error"
    type: str
    """Class of the error."""
    message: str
    retryable: bool


Message = Started | Waiting | Progress | Info | Warned | Metrics | Result | Failed
Last = Result | Failed
Report = Callable[[Message], None]
_PARSED: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


def parse_message(data: Any) -> Message:
    """`data`: a message as plain values. Raises PipelineError if it is not one."""
    try:
        return _PARSED.validate_python(data)
    except ValidationError as error:
        raise PipelineError(
            f"a message of the program is not valid ({problems_in(error)}): the program must be of this version, and "
            "report only messages of osworld_pipeline.runs.messages"
        ) from None


def problems_in(error: ValidationError) -> str:
    """Names the fields, but no values, because they may be tokens."""
    found = error.errors(include_input=False, include_url=False, include_context=False)
    return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in found)
