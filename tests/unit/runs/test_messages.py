"""Messages of programs: they arrive unchanged, and an invalid message is an error that names the field."""

import json
import math

import pytest

from osworld_pipeline.errors import PipelineError
from osworld_pipeline.runs.messages import (
    Failed,
    Info,
    Message,
    Metrics,
    Progress,
    Result,
    Started,
    Warned,
    parse_message,
)

EACH = (
    Started(),
    Progress(done=1, total=2, note="loss 0.4", stage="sft"),
    Info(message="group g0"),
    Warned(message="held"),
    Metrics(update=3, metrics={"loss": 0.5}),
    Result(result={"checkpoint_id": "c", "figures": [1, None]}),
    Failed(type="TrainingError", message="not finite", retryable=False),
    Failed(type="StoreError", message="the file b\udcff.png is damaged", retryable=False),
)


@pytest.mark.parametrize("message", EACH, ids=lambda one: one.kind)
def test_a_message_arrives_unchanged(message: Message) -> None:
    assert parse_message(json.loads(message.to_line())) == message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_not_finite_arrives_unchanged(value: float) -> None:
    sent = Metrics(update=1, metrics={"loss": value})
    arrived = parse_message(json.loads(sent.to_line()))
    assert isinstance(arrived, Metrics)
    assert arrived.metrics["loss"] == pytest.approx(value, nan_ok=True)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ({"kind": "progress", "done": "many", "total": 2}, r"progress\.done"),
        ({"kind": "progress", "done": 1, "total": 2, "pid": 7}, r"progress\.pid"),
        ({"kind": "joke"}, "kind|tag"),
        ([], "valid"),
    ],
)
def test_an_invalid_message_is_an_error_that_names_the_field(data: object, complaint: str) -> None:
    with pytest.raises(PipelineError, match=complaint):
        parse_message(data)
