"""A desktop that uses far more CPU time than its neighbours gets what they leave over."""

from dataclasses import dataclass

import pytest

from env_server.providers.cpu_shares import FIRST_S, LONGEST_S, SMALL_WEIGHT, CpuShares


@dataclass(frozen=True)
class FakeGroup:
    name: str

    def cpu_time_s(self) -> float | None:
        return None

    def weigh_cpu(self, part: float) -> None: ...


GREEDY, QUIET, OTHER = map(FakeGroup, ("greedy", "quiet", "other"))


class Clock:
    """Judges groups that each use a constant amount of CPU time per second."""

    def __init__(self, cpus: dict[FakeGroup, float]) -> None:
        self.shares, self.cpus, self.now = CpuShares[FakeGroup](num_cpus=2), cpus, 1000.0
        self.used_s = dict.fromkeys(cpus, 7.0)
        self.shares.judge(self.used_s, self.now)

    def pass_s(self, seconds: float) -> dict[str, float]:
        self.now += seconds
        for group, cpus in self.cpus.items():
            self.used_s[group] = self.used_s.get(group, 0.0) + cpus * seconds
        return {group.name: weight for group, weight in self.shares.judge(self.used_s, self.now).items()}


@pytest.mark.parametrize(
    ("cpus", "is_small"),
    [
        ({GREEDY: 2.0, QUIET: 0.1, OTHER: 0.4}, True),
        ({GREEDY: 2.0, QUIET: 0.1}, True),
        ({GREEDY: 2.0, QUIET: 0.0}, True),
        ({GREEDY: 2.0, QUIET: 0.6, OTHER: 0.6}, False),
        ({GREEDY: 0.4, QUIET: 0.01, OTHER: 0.01}, False),
        ({GREEDY: 8.0}, False),
    ],
    ids=["of three", "of two", "of idle ones", "not four times", "below the floor", "alone"],
)
def test_a_desktop_above_four_times_the_median_of_its_neighbours_gets_a_small_weight(
    cpus: dict[FakeGroup, float], is_small: bool
) -> None:
    assert Clock(cpus).pass_s(2.0) == ({"greedy": SMALL_WEIGHT} if is_small else {})


@pytest.mark.parametrize(("cpus", "is_small"), [(0.3, True), (0.12, False)], ids=["over", "under"])
def test_among_many_desktops_the_threshold_is_at_least_two_equal_parts_of_the_processors(
    cpus: float, is_small: bool
) -> None:
    crowd = {FakeGroup(f"quiet {number}"): 0.01 for number in range(31)}
    assert Clock({GREEDY: cpus} | crowd).pass_s(2.0) == ({"greedy": SMALL_WEIGHT} if is_small else {})


def test_a_small_weight_ends_and_lasts_longer_each_time_it_repeats() -> None:
    clock = Clock({GREEDY: 2.0, QUIET: 0.1})
    lasted: list[float] = []
    assert clock.pass_s(1.0) == {"greedy": SMALL_WEIGHT}
    for _ in range(8):
        began = clock.now
        while clock.pass_s(1.0) == {}:
            assert clock.now - began < 1000
        lasted.append(clock.now - began)
    assert lasted == [min(LONGEST_S, FIRST_S * 2**number) for number in range(8)]


def test_a_desktop_that_stops_using_cpu_time_gets_its_weight_back() -> None:
    clock = Clock({GREEDY: 2.0, QUIET: 0.1})
    assert clock.pass_s(1.0) == {"greedy": SMALL_WEIGHT}
    clock.cpus[GREEDY] = 0.0
    assert clock.pass_s(FIRST_S - 1) == {}
    assert clock.pass_s(1.0) == {"greedy": 1.0}


def test_a_desktop_that_has_just_started_is_not_judged_by_the_cpu_time_of_its_start() -> None:
    clock = Clock({QUIET: 0.1, OTHER: 0.1})
    clock.used_s[GREEDY] = 50.0
    clock.cpus[GREEDY] = 0.1
    assert clock.pass_s(2.0) == {}
    assert clock.pass_s(2.0) == {}
