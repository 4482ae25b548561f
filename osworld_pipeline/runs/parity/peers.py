"""Compares a server that joins with a server that has passed the parity probe, without a model.

Both sample the conversations, and the server that has passed scores the tokens of both by prefill. Its difference from
itself is the rounding of these servers. Defects cannot be imitated here, so the result only separates images from text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from osworld_pipeline.agent.parity_cases import ParitySample
from osworld_pipeline.runs.parity.verdict import WEIGHTS, Finding, Tolerance, Verdict

FACTOR = 4.0
"""Multiple of these servers' rounding that a difference may reach, if that is more than `Tolerance.rounding`."""
OTHER_TEXT = "samples from other weights, or reports log-probabilities on another scale"
OTHER_IMAGES = "uses other image features or image positions"
IMAGES = (
    "start it with the version, the backends and the options of the others (M-RoPE positions, image processor, "
    "SGLANG_VLM_CACHE_SIZE_MB=0)"
)


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A server's samples, and their log-probabilities by the server that has passed."""

    samples: Sequence[ParitySample]
    scores: Sequence[Sequence[float]]

    def diffs(self, *, has_images: bool | None = None) -> list[np.ndarray]:
        """Differences of each token, by sample; `has_images`: of those samples only."""
        return [
            np.abs(np.asarray(sample.result.logprobs) - np.asarray(scores))
            for sample, scores in zip(self.samples, self.scores, strict=True)
            if has_images is None or bool(sample.request.images) == has_images
        ]


def judge_by_peer(newcomer: Scored, passed: Scored, tolerance: Tolerance) -> Verdict:
    """`passed`: the other server's own answers. Raises ValueError if there are no samples."""
    if not newcomer.samples or not passed.samples:
        raise ValueError("nothing was sampled")
    diffs = np.concatenate(newcomer.diffs())
    limits = {has_images: _limit(passed, tolerance, has_images=has_images) for has_images in (False, True)}
    bad = {has_images: _is_over(newcomer, limit, tolerance, has_images) for has_images, limit in limits.items()}
    finding = None
    if any(bad.values()):
        finding = _finding(newcomer, is_text=bad[False])
        tolerance = Tolerance(rounding=tolerance.rounding, limit=limits[not bad[False]])
    return Verdict(
        num_tokens=len(diffs),
        mean_diff=float(diffs.mean()),
        max_diff=float(diffs.max()),
        tolerance=tolerance,
        finding=finding,
    )


def _limit(passed: Scored, tolerance: Tolerance, *, has_images: bool) -> float:
    """Limit of the mean over all samples with images, or over all without."""
    rounding = max(_mean(passed.diffs()), _mean(passed.diffs(has_images=has_images)))
    return min(tolerance.limit, max(tolerance.rounding, FACTOR * rounding))


def _is_over(newcomer: Scored, limit: float, tolerance: Tolerance, has_images: bool) -> bool:
    diffs = newcomer.diffs(has_images=has_images)
    # NaN is over the limit.
    return not (_mean(diffs) <= limit and all(one.mean() <= tolerance.limit for one in diffs))


def _finding(newcomer: Scored, *, is_text: bool) -> Finding:
    by_case = newcomer.diffs()
    worst = int(np.argmax([np.nan_to_num(one.mean(), nan=np.inf) for one in by_case]))
    return Finding(
        name=OTHER_TEXT if is_text else OTHER_IMAGES,
        advice=WEIGHTS if is_text else IMAGES,
        case=newcomer.samples[worst].case,
        mean_diff=float(by_case[worst].mean()),
        max_diff=float(by_case[worst].max()),
        left=None,
    )


def _mean(diffs: Sequence[np.ndarray]) -> float:
    return float(np.concatenate(diffs).mean()) if diffs else 0.0
