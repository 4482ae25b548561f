"""Rounding is distinguished from defects by size, by the effect of images, and by what imitating a defect leaves."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from osworld_pipeline.agent.parity_cases import ParitySample
from osworld_pipeline.domain.episode import SamplingParams
from osworld_pipeline.protocols import GenerateRequest, GenerateResult
from osworld_pipeline.runs.parity.verdict import Finding, judge
from osworld_pipeline.training.parity.defects import DEFECTS, Defect

NUM_IDS, NUM_TOKENS = 60, 8
CASES = ("text", "one image", "two images", "three images")
NO_ROWS, LATER_UNSEEN = DEFECTS[0].name, "drops every image after the first turn"


@dataclass
class FakeReference:
    """Random logits for each sample, and others under a defect for the cases that the defect is known to change."""

    dtype: torch.dtype
    moved: Mapping[str, float] = field(default_factory=dict)
    """By defect, how far it moves logits."""
    changes: Callable[[str, int], bool] = lambda name, num_images: num_images > 0

    def logits(self, sample: ParitySample) -> torch.Tensor:
        return self._random(sample, 1) * 2

    def logits_under(self, defect: Defect, sample: ParitySample) -> torch.Tensor | None:
        num_images = len(sample.request.images)
        if not self.changes(defect.name, num_images):
            return None
        seed = 10 + [one.name for one in DEFECTS].index(defect.name)
        return self.logits(sample) + self.moved.get(defect.name, 1.0) * self._random(sample, seed)

    def logprobs(
        self, sample: ParitySample, logits_NV: torch.Tensor, *, temperature: float, with_banned: bool = False
    ) -> np.ndarray:
        scaled_NV = logits_NV / temperature
        if not with_banned:
            scaled_NV[:, -5:] = -torch.inf
        return torch.log_softmax(scaled_NV, -1).gather(1, torch.tensor(sample.result.token_ids)[:, None])[:, 0].numpy()

    def _random(self, sample: ParitySample, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * seed + CASES.index(sample.case))
        return torch.randn(NUM_TOKENS, NUM_IDS, generator=generator)


def sample_of(case: str, logprobs: tuple[float, ...] = ()) -> ParitySample:
    request = GenerateRequest(
        sampling=SamplingParams(temperature=2.0), token_ids=(1, 2), images=(b"image",) * CASES.index(case)
    )
    ids = tuple(range(NUM_TOKENS))
    result = GenerateResult(text="", policy_version=0, finish_reason="length", token_ids=ids, logprobs=logprobs)
    return ParitySample(case=case, request=request, result=result)


def finding_of(
    reference: FakeReference, *, noise: float, defect: str | None = None, shift: Mapping[str, float] | None = None
) -> Finding | None:
    """The finding on an engine with this mean rounding, this defect, and these unknown differences by case."""
    rng = np.random.default_rng(3)
    samples = []
    for case in CASES:
        asked = sample_of(case)
        logits_NV = reference.logits(asked)
        if defect is not None:
            under = reference.logits_under(next(one for one in DEFECTS if one.name == defect), asked)
            logits_NV = logits_NV if under is None else under
        own = reference.logprobs(asked, logits_NV, temperature=2.0)
        rounding = rng.normal(0.0, noise * 1.25, NUM_TOKENS)
        samples.append(sample_of(case, tuple(own + rounding + (shift or {}).get(case, 0.0))))
    fake: Any = reference
    return judge(samples, fake).finding


@pytest.mark.parametrize(("dtype", "noise"), [(torch.float32, 2e-5), (torch.bfloat16, 3e-3), (torch.bfloat16, 0.03)])
def test_rounding_of_the_size_that_engines_have_is_not_a_defect(dtype: torch.dtype, noise: float) -> None:
    assert finding_of(FakeReference(dtype), noise=noise) is None


@pytest.mark.parametrize(
    ("dtype", "noise", "moved"),
    [(torch.float32, 1e-6, 2e-3), (torch.bfloat16, 1e-3, 0.05), (torch.bfloat16, 0.02, 1.0)],
)
def test_a_known_defect_is_named_even_if_it_is_smaller_than_rounding_may_be(
    dtype: torch.dtype, noise: float, moved: float
) -> None:
    finding = finding_of(FakeReference(dtype, moved={NO_ROWS: moved}), noise=noise, defect=NO_ROWS)
    assert finding is not None
    assert finding.name == NO_ROWS
    assert finding.left is not None
    assert finding.left < 0.25 * finding.mean_diff


def test_a_defect_of_some_samples_is_named_by_the_difference_that_it_leaves_in_them() -> None:
    reference = FakeReference(torch.bfloat16, changes=lambda name, num: num > (1 if name == LATER_UNSEEN else 0))
    finding = finding_of(reference, noise=0.02, defect=LATER_UNSEEN)
    assert finding is not None
    assert (finding.name, finding.case in ("two images", "three images")) == (LATER_UNSEEN, True)


def test_a_defect_that_explains_half_of_the_samples_is_not_named() -> None:
    reference = FakeReference(torch.float32, changes=lambda name, num: num > (1 if name == LATER_UNSEEN else 0))
    finding = finding_of(reference, noise=1e-6, defect=LATER_UNSEEN, shift={"one image": 0.5})
    assert finding is not None
    assert (finding.name, finding.left) == ("uses image features that differ from this checkpoint's", None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_unexplained_difference_is_other_images_if_text_agrees_and_other_weights_if_not(
    dtype: torch.dtype,
) -> None:
    images = finding_of(FakeReference(dtype), noise=1e-6, shift=dict.fromkeys(CASES[1:], 0.3))
    weights = finding_of(FakeReference(dtype), noise=1e-6, shift=dict.fromkeys(CASES, 0.3))
    assert images is not None
    assert weights is not None
    assert images.name == "uses image features that differ from this checkpoint's"
    assert weights.name == "samples from other weights than this checkpoint's"


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-3), (torch.bfloat16, 0.1)])
def test_one_sample_beyond_the_tolerance_is_enough_for_a_finding(dtype: torch.dtype, limit: float) -> None:
    assert finding_of(FakeReference(dtype), noise=0.0, shift={"two images": 0.9 * limit}) is None
    finding = finding_of(FakeReference(dtype), noise=0.0, shift={"two images": 1.1 * limit})
    assert finding is not None
    assert finding.case == "two images"
    assert finding.mean_diff == pytest.approx(1.1 * limit, rel=1e-3)


def test_a_verdict_without_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing was sampled"):
        judge([], FakeReference(torch.float32))  # pyright: ignore[reportArgumentType]
