"""A policy small enough to enumerate: a table of logits by prefix, three response tokens at most, an observation token
between two of them, one banned id. Everything here is written without the code under test."""

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

import torch

VOCAB = 5
END, BANNED, OBSERVATION = 0, 3, 4
"""The observation token stands in sequences, is never a response, and is not to be learned; the banned id has a large
logit, so that a trainer which forgets the ban is far off."""
MAX_RESPONSES = 3
TEMPERATURES = (0.3, 0.5, 0.8, 1.0)


@dataclass(frozen=True)
class Sequence:
    responses: tuple[int, ...]

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        """The prompt, then responses with an observation after the first."""
        first, *rest = self.responses
        return (OBSERVATION, first, OBSERVATION, *rest) if rest else (OBSERVATION, first)

    @cached_property
    def mask(self) -> tuple[int, ...]:
        return (0, 1, 0, *(1 for _ in self.responses[1:])) if len(self.responses) > 1 else (0, 1)

    @cached_property
    def states(self) -> tuple[tuple[int, ...], ...]:
        return tuple(self.responses[:index] for index in range(len(self.responses)))

    @property
    def reward(self) -> float:
        """Some function of the sequence that does not depend on its first token."""
        return math.sin(7.0 * sum((1 + index) * token for index, token in enumerate(self.responses[1:], start=1)))


def all_sequences() -> list[Sequence]:
    allowed = [token for token in range(VOCAB) if token != BANNED]
    found = []
    for length in range(1, MAX_RESPONSES + 1):
        for responses in itertools.product(allowed, repeat=length):
            ends_early = END in responses[:-1]
            is_over = responses[-1] == END or length == MAX_RESPONSES
            # The first response never ends the sequence, so its value does not change the reward.
            if not ends_early and is_over and responses[0] != END:
                found.append(Sequence(responses))
    return found


SEQUENCES = all_sequences()
STATES = sorted({state for sequence in SEQUENCES for state in sequence.states})
INDEX = {state: index for index, state in enumerate(STATES)}


def random_table(seed: int, *, scale: float = 1.0) -> torch.Tensor:
    table = scale * torch.randn(len(STATES), VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    table[:, BANNED] = 3.0
    table[INDEX[()], END] = -200.0  # in effect probability 0: the first response does not end
    return table


def log_probability(table: torch.Tensor, sequence: Sequence, temperature: float) -> torch.Tensor:
    """That of the whole sequence, under softmax(logits / temperature) over the ids that are not banned."""
    allowed = [token for token in range(VOCAB) if token != BANNED]
    total = table.new_zeros(())
    for state, token in zip(sequence.states, sequence.responses, strict=True):
        row = table[INDEX[state]][allowed] / temperature
        total = total + row[allowed.index(token)] - torch.logsumexp(row, 0)
    return total


def token_log_ratios(new: torch.Tensor, old: torch.Tensor, sequence: Sequence, temperature: float) -> list[float]:
    ratios = []
    for state, token in zip(sequence.states, sequence.responses, strict=True):
        pair = []
        for table in (new, old):
            allowed = [one for one in range(VOCAB) if one != BANNED]
            row = table[INDEX[state]][allowed] / temperature
            pair.append(float(row[allowed.index(token)] - torch.logsumexp(row, 0)))
        ratios.append(pair[0] - pair[1])
    return ratios
