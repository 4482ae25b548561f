"""Injected faults for tests of clients: shares of the calls that fail before they are executed, lose their answer
after it, get a busy answer, or are slow. Seeded."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass
from typing import Literal, Self

KINDS = ("fail", "lose", "busy", "slow")
Fault = Literal["fail", "lose", "busy"]
MAX_SLOW_S = 600.0


@dataclass(frozen=True, kw_only=True)
class FaultShares:
    """Shares of all calls, each in 0..1, and the wait of a slow call."""

    fail: float = 0.0
    """502 before the call is executed."""
    lose: float = 0.0
    """502 after the call is executed: the answer is lost."""
    busy: float = 0.0
    """429 with Retry-After."""
    slow: float = 0.0
    slow_s: float = 1.0
    """How long a slow call waits before it is executed."""

    @classmethod
    def read(cls, text: str) -> Self:
        """`fail=0.1,lose=0.05,busy=0.1,slow=0.2:1.5`; the last number is seconds.

        Raises:
            ValueError: an unknown name, not a number, a share outside 0..1, shares whose sum exceeds 1, or a wait that
                is too long.
        """
        values: dict[str, float] = {}
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            name, _, value = part.partition("=")
            share, _, seconds = value.partition(":")
            try:
                values[name] = float(share)
                if seconds:
                    values[f"{name}_s"] = float(seconds)
            except ValueError:
                raise ValueError(f"a fault is NAME=SHARE, for example fail=0.1, not {part!r}") from None
            if name not in KINDS or (seconds and name != "slow"):
                raise ValueError(f"there is no fault {part!r}; known faults: fail, lose, busy, slow=SHARE:SECONDS")
            if not 0.0 <= values[name] <= 1.0:
                raise ValueError(f"the share of {name} must be 0 to 1, not {share}")
        shares = cls(**values)
        if not shares.fail + shares.lose + shares.busy <= 1.0:
            raise ValueError("fail, lose and busy are shares of the same calls: their sum must be at most 1")
        if not 0.0 <= shares.slow_s <= MAX_SLOW_S:
            raise ValueError(f"a slow call must wait 0 to {MAX_SLOW_S:g} seconds")
        return shares


class Faults:
    def __init__(self, shares: FaultShares, *, seed: int = 0) -> None:
        self._shares = shares
        self._random = random.Random(seed)
        self.num_made: Counter[str] = Counter()

    async def draw(self) -> Fault | None:
        """Waits if the next call is to be slow, then returns its fault."""
        shares = self._shares
        if self._random.random() < shares.slow:
            self.num_made["slow"] += 1
            await asyncio.sleep(shares.slow_s)
        drawn = self._random.random()
        for kind, share in (("fail", shares.fail), ("lose", shares.lose), ("busy", shares.busy)):
            if drawn < share:
                self.num_made[kind] += 1
                return kind  # pyright: ignore[reportReturnType] - one of the literals
            drawn -= share
        return None
