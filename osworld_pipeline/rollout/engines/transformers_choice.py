"""Selects the next tokens and detects stop strings: sampling for all rows of a batch.

Shapes: B rows, V vocabulary.
"""

from collections.abc import Sequence

import torch

from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.episode import SamplingParams


def choose_tokens(
    logits_BV: torch.Tensor,
    samplings: Sequence[SamplingParams],
    chances: Sequence[float],
    banned_V: torch.Tensor,
) -> tuple[list[int], list[float]]:
    """A token of each row and its log-probability as defined in protocols.GenerateResult. At temperature 0 it is the
    most likely token; otherwise the first one, in id order, at which the cumulative probability exceeds the row's
    chance (0 <= chance < 1). A row's choice is the same in any batch."""
    temperatures = [sampling.temperature if sampling.temperature > 0 else 1.0 for sampling in samplings]
    scaled_BV = logits_BV.float() / torch.tensor(temperatures, device=logits_BV.device)[:, None]
    logprobs_BV = torch.log_softmax(scaled_BV.masked_fill(banned_V, -torch.inf), dim=-1)
    next_B = logprobs_BV.argmax(dim=-1)
    if any(sampling.temperature > 0 for sampling in samplings):
        is_sampled_B = torch.tensor([sampling.temperature > 0 for sampling in samplings], device=logits_BV.device)
        next_B = torch.where(is_sampled_B, _sample(logprobs_BV, samplings, chances), next_B)
    return next_B.tolist(), logprobs_BV.gather(1, next_B[:, None])[:, 0].tolist()


def _sample(logprobs_BV: torch.Tensor, samplings: Sequence[SamplingParams], chances: Sequence[float]) -> torch.Tensor:
    device = logprobs_BV.device
    probs_BV = logprobs_BV.exp()
    for index, sampling in enumerate(samplings):
        if sampling.top_p < 1:
            probs_BV[index] = keep_top_p(probs_BV[index], sampling.top_p)
    # In double precision, so that the last ids of a large vocabulary are not lost to rounding.
    sums_BV = probs_BV.double().cumsum(dim=-1)
    aims_B1 = torch.tensor(chances, dtype=torch.double, device=device)[:, None] * sums_BV[:, -1:]
    return torch.searchsorted(sums_BV, aims_B1, right=True)[:, 0].clamp_(max=logprobs_BV.shape[1] - 1)


def keep_top_p(probs_V: torch.Tensor, top_p: float) -> torch.Tensor:
    """Zeros outside the smallest set of tokens whose probability reaches top_p."""
    sorted_V, order_V = probs_V.sort(descending=True, stable=True)
    # A token is kept while the probability before it is below top_p: the first always is.
    kept_V = sorted_V.cumsum(dim=-1) - sorted_V < top_p
    return torch.zeros_like(probs_V).scatter(0, order_V, sorted_V * kept_V)


class StopCheck:
    """Detects whether the newest token completes a stop string. No stop string was complete before, so one must end
    within that token: the token's text is looked up first, and the tail is decoded only if a stop string can end there.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._texts: dict[int, str] = {}

    def is_complete(self, token_ids: Sequence[int], stops: Sequence[str]) -> bool:
        if not stops:
            return False
        text = self._text_of(token_ids[-1])
        # A token that is part of a character decodes to the replacement character.
        if "\ufffd" not in text and not any(stop[-1] in text for stop in stops):
            return False
        # A token is at least one byte, so a stop string of n bytes is within the last n tokens.
        window = max(len(stop.encode()) for stop in stops)
        tail = self._renderer.decode_response(token_ids[-window:])
        return any(stop in tail for stop in stops)

    def _text_of(self, token_id: int) -> str:
        if token_id not in self._texts:
            self._texts[token_id] = self._renderer.tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        return self._texts[token_id]
