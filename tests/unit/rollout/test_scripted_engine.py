"""The engine that reads from scripts: each attempt starts its episode's script from the beginning."""

import pytest

from osworld_pipeline.domain.episode import SamplingParams
from osworld_pipeline.errors import EngineError
from osworld_pipeline.protocols import ChatTurn, GenerateRequest
from osworld_pipeline.rollout.engines.scripted import ScriptedEngine


def ask(attempt_id: str) -> GenerateRequest:
    turns = (ChatTurn(role="user", text="What now?"),)
    return GenerateRequest(sampling=SamplingParams(temperature=0.0), turns=turns, episode_id=attempt_id)


async def test_answers_come_in_turn_and_another_attempt_starts_from_the_beginning() -> None:
    engine = ScriptedEngine({"e-a": ["first", "second"]})
    first = [(await engine.generate(ask("e-a-a0"))).text for _ in range(2)]
    await engine.forget("e-a-a0")
    again = [(await engine.generate(ask("e-a-a1"))).text for _ in range(2)]
    assert first == again == ["first", "second"]


@pytest.mark.parametrize("attempt_id", ["e-a0", "stranger-a0"])
async def test_a_script_that_has_ended_or_was_never_written_is_a_fault_and_not_an_answer(attempt_id: str) -> None:
    engine = ScriptedEngine({"e": []})
    with pytest.raises(EngineError, match="has no answer for turn 0"):
        await engine.generate(ask(attempt_id))
