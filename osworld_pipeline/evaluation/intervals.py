"""How sure a success rate is: the Wilson score interval."""

import math
from statistics import NormalDist


def wilson_interval(successes: int, n: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """The interval of a binomial proportion by inverting the score test (Wilson 1927, JASA 22(158):209-212):

        (p + z²/2n ± z·sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n),  z the normal quantile of (1 + confidence)/2

    It stays inside 0..1 and is honest for small n, and for 0 or n successes, where the usual p ± z·s.e. is not.
    Without observations nothing is known: (0, 1).

    Raises:
        ValueError: not 0 <= successes <= n, or a confidence outside 0..1.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n}")
    z = _quantile(confidence)
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    centre = p + z * z / (2 * n)
    spread = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    low = 0.0 if successes == 0 else max(0.0, (centre - spread) / scale)
    high = 1.0 if successes == n else min(1.0, (centre + spread) / scale)
    return low, high


def _quantile(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"a confidence of {confidence}")
    return NormalDist().inv_cdf((1 + confidence) / 2)
