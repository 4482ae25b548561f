"""Two servers are compared without a model: by the size of a difference, and by how much each differs from itself."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from osworld_pipeline.agent.parity_cases import ParitySample
from osworld_pipeline.domain.episode import SamplingParams
from osworld_pipeline.protocols import GenerateRequest, GenerateResult
from osworld_pipeline.runs.parity.peers import OTHER_IMAGES, OTHER_TEXT, Scored, judge_by_peer
from osworld_pipeline.runs.parity.verdict import Finding, tolerance_of

CASES = ("text", "screen", "tall screen", "two turns")
EXACT, HALF = tolerance_of("float32"), tolerance_of("bfloat16")


def scored(diffs: Sequence[float]) -> Scored:
    """One sample of each case; its eight tokens differ by the given amount."""
    scores = np.random.default_rng(1).uniform(-5, -0.1, (len(CASES), 8))
    samples = []
    for case, one, diff in zip(CASES, scores, diffs, strict=True):
        request = GenerateRequest(sampling=SamplingParams(temperature=2.0), images=(b"",) * (case != "text"))
        result = GenerateResult(
            text="", policy_version=0, finish_reason="length", token_ids=(1,) * 8, logprobs=tuple(one + diff)
        )
        samples.append(ParitySample(case=case, request=request, result=result))
    return Scored(samples=samples, scores=scores.tolist())


def finding(newcomer: Sequence[float], passed: Sequence[float], *, is_half: bool = False) -> Finding | None:
    return judge_by_peer(scored(newcomer), scored(passed), HALF if is_half else EXACT).finding


@pytest.mark.parametrize(
    ("newcomer", "passed", "is_half"),
    [
        ((1e-7,) * 4, (1e-7,) * 4, False),
        ((5e-5,) * 4, (0.0,) * 4, False),
        ((4e-3,) * 4, (0.0,) * 4, True),
        ((0.03,) * 4, (0.01,) * 4, True),
    ],
)
def test_a_difference_no_larger_than_rounding_passes(
    newcomer: Sequence[float], passed: Sequence[float], is_half: bool
) -> None:
    assert finding(newcomer, passed, is_half=is_half) is None


def test_a_difference_of_images_alone_is_distinguished_from_one_of_text() -> None:
    images = finding((1e-7, 3e-3, 2e-3, 3e-3), (1e-7,) * 4)
    assert images is not None
    assert (images.name, images.case) == (OTHER_IMAGES, "screen")
    assert images.mean_diff == pytest.approx(3e-3)
    text = finding((0.2, 0.3, 0.2, 0.2), (0.01,) * 4, is_half=True)
    assert text is not None
    assert text.name == OTHER_TEXT


def test_a_difference_far_above_the_rounding_of_these_servers_is_refused_even_below_the_limit() -> None:
    assert finding((4e-3, 0.06, 0.06, 0.06), (4e-3, 0.01, 0.01, 0.01), is_half=True) is not None
    assert finding((4e-3, 0.06, 0.06, 0.06), (4e-3, 0.02, 0.02, 0.02), is_half=True) is None


def test_noisy_servers_do_not_raise_the_limit_and_one_conversation_above_it_is_enough() -> None:
    assert finding((0.05, 0.12, 0.05, 0.05), (0.09,) * 4, is_half=True) is not None


def test_a_log_probability_that_is_not_a_number_is_refused() -> None:
    found = finding((0.0, math.nan, 0.0, 0.0), (0.0,) * 4)
    assert found is not None
    assert found.case == "screen"


def test_the_verdict_has_the_limit_that_applied_and_the_number_of_all_tokens() -> None:
    verdict = judge_by_peer(scored((1e-7, 3e-3, 3e-3, 3e-3)), scored((1e-7,) * 4), EXACT)
    assert (verdict.num_tokens, verdict.tolerance.limit) == (32, 1e-4)
    assert verdict.max_diff == pytest.approx(3e-3)
