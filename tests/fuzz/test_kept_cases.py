"""Every parser of foreign bytes accepts its samples, refuses damaged ones with its own errors, and keeps its fixes."""

import random
from pathlib import Path

import pytest

from fuzz.parser import CASES, HARD_VALUES, Parser
from fuzz.parsers import PARSERS, guests

NUM_DAMAGED = 12
WITH_NUMBERS = {name: parser for name, parser in PARSERS.items() if parser.has_numbers}


@pytest.mark.parametrize("parser", PARSERS.values(), ids=PARSERS)
def test_samples_of_a_parser_are_accepted(parser: Parser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guests, "ANSWER_LIMIT_S", 10.0)  # each sample gets an answer, and a busy machine is slow
    assert [seed[:60] for seed in parser.seeds if parser.refuses(seed)] == []


@pytest.mark.parametrize("parser", PARSERS.values(), ids=PARSERS)
def test_damaged_samples_end_in_an_answer_or_a_refusal(parser: Parser) -> None:
    rng = random.Random(parser.name)
    for _ in range(NUM_DAMAGED):
        data = bytearray(rng.choice(parser.seeds))
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.choice((0, 10, 34, 123, 255, rng.randrange(256)))
        parser.refuses(bytes(data[: rng.randint(1, len(data))] if rng.random() < 0.3 else data))


@pytest.mark.parametrize("parser", WITH_NUMBERS.values(), ids=WITH_NUMBERS)
@pytest.mark.parametrize("value", HARD_VALUES.values(), ids=HARD_VALUES)
def test_a_number_of_any_size_ends_in_an_answer_or_a_refusal(parser: Parser, value: bytes) -> None:
    for data in parser.hard_inputs(value):
        parser.refuses(data)


@pytest.mark.parametrize(
    "path",
    [case for parser in PARSERS.values() for case in parser.cases],
    ids=lambda path: f"{path.parent.name}-{path.name}",
)
def test_input_that_once_broke_a_parser_does_not_break_it_again(path: Path) -> None:
    PARSERS[path.parent.name].refuses(path.read_bytes())


def test_every_folder_of_cases_belongs_to_a_parser() -> None:
    assert {path.name for path in CASES.iterdir() if path.is_dir()} <= set(PARSERS)
