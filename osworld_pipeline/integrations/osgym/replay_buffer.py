"""OSGym's ReplayBuffer: a ring buffer of steps with discounted returns, for sampling.

It is not `rollout.replay.ReplayBuffer`, which adds a recorded success to a group of failures. The name is from OSGym's
documentation. This buffer holds the steps of complete episodes, successful or not.
"""

import math
import random
from collections.abc import Mapping
from typing import Any

Item = tuple[int, dict[str, Any], Mapping[str, Any]]
"""(worker_id, env_ret, meta_info): `env_ret` holds `reward` and `done`, `meta_info` the episode's `uid`."""
MAX_OPEN_EPISODES = 4096
"""Limit of unfinished episodes; beyond it the oldest is dropped."""


class ReplayBuffer:
    """Holds the newest `capacity` steps of finished episodes. An episode becomes visible as a whole when it ends."""

    def __init__(
        self,
        capacity: int = 10_000,
        gamma: float = 1.0,
        only_keep_outcome: bool = False,
        balance_thres: float = 0.1,
        *,
        seed: int | None = None,
    ) -> None:
        """`gamma`: a step's return is its reward plus gamma times the next step's return. With `only_keep_outcome` only
        the last step of an episode is kept, with its reward. Returns below `balance_thres` are low.

        Raises:
            ValueError: a capacity below 1, or a gamma outside 0..1.
        """
        if capacity < 1:
            raise ValueError(f"a replay buffer must hold at least one step, not {capacity}")
        if not 0.0 <= gamma <= 1.0:
            raise ValueError(f"gamma must be a discount from 0 to 1, not {gamma}")
        self.capacity = capacity
        self.gamma = gamma
        self.only_keep_outcome = only_keep_outcome
        self.balance_thres = balance_thres
        self._ring: list[Item] = []
        self._oldest = 0
        """Index of the oldest item in a full ring, which the next item replaces."""
        self._open: dict[str, list[Item]] = {}
        """uid -> the steps of an unfinished episode"""
        self._random = random.Random(seed)

    def __len__(self) -> int:
        """Number of steps that can be sampled."""
        return len(self._ring)

    @property
    def items(self) -> tuple[Item, ...]:
        """The items from the oldest to the newest."""
        return (*self._ring[self._oldest :], *self._ring[: self._oldest])

    @property
    def num_open_episodes(self) -> int:
        """Started and not ended."""
        return len(self._open)

    def add(self, data: Item) -> None:
        """Adds one step; the last of an episode (`done`) makes all of it visible.

        Raises:
            ValueError: a step without a finite reward or without a uid.
        """
        _, env_ret, meta_info = data
        uid, reward = meta_info.get("uid"), env_ret.get("reward")
        if not isinstance(uid, str) or not uid:
            raise ValueError("a step's meta_info needs a uid, the name of its episode")
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            raise ValueError(f"a step of episode {uid} has the reward {reward!r}, which is not a finite number")
        self._open.setdefault(uid, []).append(data)
        if env_ret.get("done"):
            self._finish(self._open.pop(uid))
        elif len(self._open) > MAX_OPEN_EPISODES:
            self.drop(next(iter(self._open)))

    def drop(self, uid: str) -> None:
        """Drops an unfinished episode: a fault is never a reward of zero."""
        self._open.pop(uid, None)

    def sample(self, batch_size: int, *, is_balanced: bool = True) -> list[Item]:
        """Samples at most `batch_size` different steps. Balanced: equally many low returns and others, as far as
        possible; otherwise uniformly at random."""
        if not is_balanced:
            return self._random.sample(self._ring, min(batch_size, len(self._ring)))
        low = [item for item in self._ring if self._is_low(item)]
        high = [item for item in self._ring if not self._is_low(item)]
        few, many = sorted((low, high), key=len)
        drawn = self._random.sample(few, min(len(few), batch_size // 2))
        drawn += self._random.sample(many, min(len(many), batch_size - len(drawn)))
        self._random.shuffle(drawn)
        return drawn

    def get_balance_stats(self) -> tuple[int, int]:
        """Numbers of steps with a return below the threshold, and not below it."""
        below = sum(self._is_low(item) for item in self._ring)
        return below, len(self._ring) - below

    def clear(self) -> None:
        """Removes every step, including those of unfinished episodes."""
        self._ring.clear()
        self._open.clear()
        self._oldest = 0

    def _finish(self, episode: list[Item]) -> None:
        if self.only_keep_outcome:
            self._keep(episode[-1])
            return
        following = 0.0
        returns: list[float] = []
        for _, env_ret, _ in reversed(episode):
            following = env_ret["reward"] + self.gamma * following
            returns.append(following)
        for (worker_id, env_ret, meta_info), discounted in zip(episode, reversed(returns), strict=True):
            self._keep((worker_id, {**env_ret, "reward": discounted}, meta_info))

    def _keep(self, item: Item) -> None:
        if len(self._ring) < self.capacity:
            self._ring.append(item)
            return
        self._ring[self._oldest] = item
        self._oldest = (self._oldest + 1) % self.capacity

    def _is_low(self, item: Item) -> bool:
        return item[1]["reward"] < self.balance_thres
