"""Decides whether an engine samples from a checkpoint, and if not, which known defect explains the difference.

Two checks separate rounding from defects: the size of the difference, and whether a forward pass with a known defect is
much nearer to the reported log-probabilities than the correct one.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from osworld_pipeline.agent.parity_cases import ParitySample

if TYPE_CHECKING:
    from osworld_pipeline.training.parity.reference import ParityReference

EXPLAINED = 0.25
"""A defect explains a difference if at most this share of it remains."""
IMAGE_FACTOR = 3.0
"""Within the limit, known defects are tried only if a sample with images differs by more than this many times as much
as text samples."""
SCALES = (0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 1.25, 1.5, 2.0, 4.0)
"""Factors of a wrong temperature that are tried."""
CONTRACT = "check that the server reports log-probabilities after temperature and gives banned ids no probability"
WEIGHTS = "load this checkpoint into the server, in the precision of model.dtype"
FEATURES = (
    "start it with SGLANG_VLM_CACHE_SIZE_MB=0 (a vision cache keeps the features of older weights), and check that it "
    "has this checkpoint's vision tower and image processor"
)


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Limits of a mean difference of log-probabilities."""

    rounding: float
    """Differences up to here need no explanation."""
    limit: float
    """Differences above this are a defect, known or not."""


TOLERANCES = {"float32": Tolerance(rounding=1e-4, limit=1e-3)}
HALF_PRECISION = Tolerance(rounding=5e-3, limit=0.1)
"""Tolerance of bfloat16 and float16."""


def tolerance_of(dtype: str) -> Tolerance:
    return TOLERANCES.get(dtype, HALF_PRECISION)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The reason why an engine is refused."""

    name: str
    """Completes the sentence "it ..."."""
    advice: str
    case: str
    """The case with the largest difference."""
    mean_diff: float
    max_diff: float
    left: float | None
    """Mean difference over all samples that remains with the defect imitated; None if no known defect fits, or none was
    tried (peers.py)."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    num_tokens: int
    mean_diff: float
    max_diff: float
    tolerance: Tolerance
    finding: Finding | None


def judge(samples: Sequence[ParitySample], reference: "ParityReference") -> Verdict:
    """Raises ValueError if there are no samples."""
    if not samples:
        raise ValueError("nothing was sampled")
    comparison = _Comparison(samples, reference)
    diffs = np.concatenate(comparison.diffs)
    return Verdict(
        num_tokens=len(diffs),
        mean_diff=float(diffs.mean()),
        max_diff=float(diffs.max()),
        tolerance=comparison.tolerance,
        finding=comparison.find(),
    )


@dataclass(frozen=True, kw_only=True)
class _Imitation:
    """Differences between the reported log-probabilities and those of an imitated defect."""

    name: str
    advice: str
    means: Sequence[float | None]
    """Mean difference of each sample; None if the defect does not change it."""


class _Comparison:
    def __init__(self, samples: Sequence[ParitySample], reference: "ParityReference") -> None:
        self._samples = samples
        self._reference = reference
        self._logits = [reference.logits(sample) for sample in samples]
        self._reported = [np.asarray(sample.result.logprobs) for sample in samples]
        self.tolerance = tolerance_of(str(reference.dtype).removeprefix("torch."))
        self.diffs = self._diffs_under(lambda _: 1.0, with_banned=False)
        self._means = [float(diffs.mean()) for diffs in self.diffs]

    def find(self) -> Finding | None:
        limit = self.tolerance.limit
        is_over = not all(mean <= limit for mean in self._means)
        if not is_over and max(self._means) <= self.tolerance.rounding:
            return None
        known = self._best(self._scale_errors())
        if known is None and (is_over or self._differs_by_images()):
            known = self._best(self._defect_errors())
        if known is not None or not is_over:
            return known
        if all(mean <= limit for mean in self._means_of(has_images=False)):
            return self._finding("uses image features that differ from this checkpoint's", FEATURES, left=None)
        return self._finding("samples from other weights than this checkpoint's", WEIGHTS, left=None)

    def _differs_by_images(self) -> bool:
        text = max([self.tolerance.rounding / IMAGE_FACTOR, *self._means_of(has_images=False)])
        return any(mean > IMAGE_FACTOR * text for mean in self._means_of(has_images=True))

    def _means_of(self, *, has_images: bool) -> list[float]:
        return [
            mean
            for mean, sample in zip(self._means, self._samples, strict=True)
            if bool(sample.request.images) == has_images
        ]

    def _scale_errors(self) -> Iterable[_Imitation]:
        """Ways to report wrong log-probabilities of correct logits."""

        def imitation(name: str, scale: Callable[[float], float], *, with_banned: bool) -> _Imitation:
            diffs = self._diffs_under(scale, with_banned=with_banned)
            return _Imitation(name=name, advice=CONTRACT, means=[float(part.mean()) for part in diffs])

        yield imitation("gives probability to ids that are never sampled", lambda _: 1.0, with_banned=True)
        for with_banned in (False, True):
            yield imitation(
                "reports log-probabilities before temperature",
                lambda temperature: 1.0 / temperature,
                with_banned=with_banned,
            )
            for scale in SCALES:
                name = f"reports log-probabilities at {scale:g} times the temperature that was asked for"
                yield imitation(name, functools.partial(_always, scale), with_banned=with_banned)

    def _diffs_under(self, scale: Callable[[float], float], *, with_banned: bool) -> list[np.ndarray]:
        diffs = []
        for sample, logits_NV, reported in zip(self._samples, self._logits, self._reported, strict=True):
            asked = sample.request.sampling.temperature
            own = self._reference.logprobs(sample, logits_NV, temperature=asked * scale(asked), with_banned=with_banned)
            diffs.append(np.abs(own - reported))
        return diffs

    def _defect_errors(self) -> Iterable[_Imitation]:
        from osworld_pipeline.training.parity.defects import DEFECTS

        for defect in DEFECTS:
            means: list[float | None] = []
            for sample, reported in zip(self._samples, self._reported, strict=True):
                logits_NV = self._reference.logits_under(defect, sample)
                if logits_NV is None:
                    means.append(None)
                    continue
                own = self._reference.logprobs(sample, logits_NV, temperature=sample.request.sampling.temperature)
                means.append(float(np.abs(own - reported).mean()))
            yield _Imitation(name=defect.name, advice=defect.advice, means=means)

    def _best(self, imitations: Iterable[_Imitation]) -> Finding | None:
        """The imitation with the smallest remainder, if at most the share EXPLAINED of the mean difference of the
        samples that it changes remains, and each other sample differs by no more than this limit or rounding."""
        best = min(imitations, key=self._left)
        changed = [(own, left) for own, left in zip(self._means, best.means, strict=True) if left is not None]
        if not changed:
            return None
        explained = EXPLAINED * float(np.mean([own for own, _ in changed]))
        others = [own for own, left in zip(self._means, best.means, strict=True) if left is None]
        if float(np.mean([left for _, left in changed])) > explained:
            return None
        if any(own > max(self.tolerance.rounding, explained) for own in others):
            return None
        return self._finding(best.name, best.advice, left=self._left(best))

    def _left(self, imitation: _Imitation) -> float:
        means = [own if left is None else left for own, left in zip(self._means, imitation.means, strict=True)]
        return float(np.nan_to_num(np.mean(means), nan=np.inf))

    def _finding(self, name: str, advice: str, *, left: float | None) -> Finding:
        # NaN counts as the largest mean.
        worst = int(np.argmax(np.nan_to_num(self._means, nan=np.inf)))
        return Finding(
            name=name,
            advice=advice,
            case=self._samples[worst].case,
            mean_diff=self._means[worst],
            max_diff=float(self.diffs[worst].max()),
            left=left,
        )


def _always(scale: float, temperature: float) -> float:
    return scale
