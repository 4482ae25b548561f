"""When a difference is called an effect: checked with hand-computed numbers and with trainings that change nothing."""

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osworld_pipeline.evaluation.comparison import Comparison, Verdict, compare_paired
from osworld_pipeline.evaluation.effect import MIN_RUNS, Effect, SeedSpread, judge_effect

NARROW = SeedSpread(rates=(0.5, 0.5), half_width=0.0)


def compared(difference: float, *, p_value: float = 0.01) -> Comparison:
    return Comparison(
        before=0.3, after=0.3 + difference, difference=difference, low=difference - 0.05, high=difference + 0.05,
        p_value=p_value, num_tasks=40, confidence=0.95,
    )  # fmt: skip


def test_the_spread_is_students_interval_for_the_difference_of_two_evaluations() -> None:
    # Standard deviation of 0.4, 0.5, 0.6 is 0.1; t of 2 degrees is 4.3027; 4.3027 * 0.1 * sqrt(2/3) = 0.35131.
    spread = SeedSpread.of([0.4, 0.5, 0.6])
    assert spread is not None
    assert spread.half_width == pytest.approx(0.35131, abs=1e-5)
    assert spread.band(0.5) == pytest.approx((0.14869, 0.85131), abs=1e-5)


def test_a_band_is_clipped_to_rates_between_0_and_1() -> None:
    assert SeedSpread(rates=(0.0, 0.1), half_width=0.3).band(0.1) == (0.0, pytest.approx(0.4))
    assert SeedSpread(rates=(1.0, 0.9), half_width=0.3).band(0.9) == (pytest.approx(0.6), 1.0)


@pytest.mark.parametrize("rates", [[], [0.5]])
def test_the_spread_of_one_evaluation_is_unknown_and_not_zero(rates: list[float]) -> None:
    assert SeedSpread.of(rates) is None


def test_one_run_is_never_an_effect_however_clear_it_is() -> None:
    effect = judge_effect(compared(0.5), spread=NARROW)
    assert (effect.is_effect, effect.verdict, effect.words) == (False, Verdict.BETTER, "one run: better")
    assert effect.missing == (f"an effect needs {MIN_RUNS} training runs",)
    assert effect.across_runs is None


def test_three_runs_that_agree_are_an_effect() -> None:
    # Mean 0.2, standard deviation 0.02, t of 2 degrees 4.3027: 0.2 -+ 4.3027 * 0.02 / sqrt(3) = 0.2 -+ 0.04968.
    effect = judge_effect(compared(0.2), spread=NARROW, run_differences=[0.18, 0.2, 0.22])
    assert (effect.is_effect, effect.words, effect.missing) == (True, "effect over 3 runs: better", ())
    assert effect.across_runs == pytest.approx((0.15032, 0.24968), abs=1e-5)


def test_a_loss_is_an_effect_too() -> None:
    effect = judge_effect(compared(-0.2), spread=NARROW, run_differences=[-0.18, -0.2, -0.22])
    assert effect.words == "effect over 3 runs: worse"


def test_runs_that_disagree_show_no_difference_though_the_paired_test_does() -> None:
    # Mean 0.2, standard deviation 0.2: 0.2 -+ 0.4968 reaches over 0.
    effect = judge_effect(compared(0.2), spread=NARROW, run_differences=[0.0, 0.2, 0.4])
    assert (effect.is_effect, effect.words) == (False, "3 runs: no significant difference")
    assert effect.missing == ("the runs disagree",)


@pytest.mark.parametrize(
    ("differences", "words"), [([0.1, 0.3], "2 runs: better"), ([-0.1, 0.5], "2 runs: no significant difference")]
)
def test_two_runs_get_a_verdict_and_are_not_an_effect(differences: list[float], words: str) -> None:
    effect = judge_effect(compared(0.2), spread=NARROW, run_differences=differences)
    assert (effect.is_effect, effect.words) == (False, words)


def test_a_difference_within_the_starts_own_spread_is_not_shown() -> None:
    wide = SeedSpread(rates=(0.2, 0.4), half_width=0.2)
    inside = judge_effect(compared(0.19), spread=wide, run_differences=[0.18, 0.19, 0.2])
    outside = judge_effect(compared(0.21), spread=wide, run_differences=[0.2, 0.21, 0.22])
    assert inside.verdict is Verdict.NOT_SHOWN
    assert inside.missing == ("it is within the spread of the start's own evaluations",)
    assert outside.is_effect


def test_a_start_with_one_evaluation_seed_allows_a_verdict_but_not_an_effect() -> None:
    effect = judge_effect(compared(0.2), spread=None, run_differences=[0.19, 0.2, 0.21])
    assert (effect.is_effect, effect.words) == (False, "3 runs: better")
    assert effect.missing == ("the start's spread is unknown: it needs two evaluation seeds",)


def test_a_difference_that_the_paired_test_does_not_show_is_not_significant() -> None:
    effect = judge_effect(compared(0.2, p_value=0.06), spread=NARROW, run_differences=[0.19, 0.2, 0.21])
    assert effect.words == "3 runs: no significant difference"


Rates = Sequence[float]
NUM_TASKS, NUM_SEEDS = 24, 5


def train_and_judge(rng: random.Random, *, num_runs: int, shift_of_run: float, gain: float = 0.0) -> Effect:
    """Simulates tasks of any difficulty, in log-odds. Each run shifts all of them equally, by `gain` on average."""
    difficulties = [rng.gauss(0.0, 1.5) for _ in range(NUM_TASKS)]

    def play(moved: float) -> list[list[float]]:
        chances = [1 / (1 + math.exp(-difficulty - moved)) for difficulty in difficulties]
        return [[float(rng.random() < chance) for _ in range(NUM_SEEDS)] for chance in chances]

    start = play(0.0)
    ends = [play(rng.gauss(gain, shift_of_run)) for _ in range(num_runs)]
    before = {str(task): samples for task, samples in enumerate(start)}
    after = {str(task): [sample for end in ends for sample in end[task]] for task in range(NUM_TASKS)}
    rates = [sum(samples[seed] for samples in start) / NUM_TASKS for seed in range(NUM_SEEDS)]
    base = sum(map(sum, start)) / NUM_TASKS / NUM_SEEDS
    return judge_effect(
        compare_paired(before, after, num_resamples=200),
        spread=SeedSpread.of(rates),
        run_differences=[sum(map(sum, end)) / NUM_TASKS / NUM_SEEDS - base for end in ends],
    )


@pytest.mark.parametrize("num_runs", [MIN_RUNS, 5])
def test_trainings_that_change_nothing_on_average_are_rarely_called_an_effect(num_runs: int) -> None:
    rng = random.Random(num_runs)
    effects = [train_and_judge(rng, num_runs=num_runs, shift_of_run=1.0) for _ in range(400)]
    by_tasks = sum(effect.comparison.verdict is not Verdict.NOT_SHOWN for effect in effects)
    found = sum(effect.is_effect for effect in effects)
    # 5% of 400 and two standard deviations: 20 + 2 * sqrt(400 * 0.05 * 0.95) = 28.7.
    assert found <= 28
    assert by_tasks > 60, "the paired test over tasks takes what a run's seed does for an effect"


def test_evaluations_of_the_same_weights_rarely_differ_in_one_run() -> None:
    rng = random.Random(1)
    effects = [train_and_judge(rng, num_runs=1, shift_of_run=0.0) for _ in range(400)]
    assert sum(effect.verdict is not Verdict.NOT_SHOWN for effect in effects) <= 28
    assert not any(effect.is_effect for effect in effects)


def test_a_training_that_helps_every_time_is_mostly_called_an_effect() -> None:
    rng = random.Random(2)
    effects = [train_and_judge(rng, num_runs=5, shift_of_run=0.3, gain=3.0) for _ in range(100)]
    assert sum(effect.is_effect and effect.verdict is Verdict.BETTER for effect in effects) >= 80


@given(
    differences=st.lists(st.floats(-1, 1), min_size=1, max_size=6),
    half_width=st.none() | st.floats(0, 1),
    p_value=st.floats(0, 1),
)
def test_for_any_numbers_an_effect_is_shown_by_the_runs_the_spread_and_the_paired_test(
    differences: list[float], half_width: float | None, p_value: float
) -> None:
    difference = sum(differences) / len(differences)
    spread = None if half_width is None else SeedSpread(rates=(0.5, 0.5), half_width=half_width)
    effect = judge_effect(compared(difference, p_value=p_value), spread=spread, run_differences=differences)
    assert effect.is_effect == (not effect.missing)
    assert effect.words.startswith("effect over") == effect.is_effect
    if effect.is_effect:
        assert len(differences) >= MIN_RUNS
        assert half_width is not None
        assert abs(difference) > half_width
        assert p_value <= 0.05
        assert effect.verdict is (Verdict.BETTER if difference > 0 else Verdict.WORSE)
        assert effect.across_runs is not None
        assert effect.across_runs[0] > 0 or effect.across_runs[1] < 0


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=6))
def test_a_gain_and_a_loss_of_the_same_size_are_judged_alike(differences: list[float]) -> None:
    mean = sum(differences) / len(differences)
    gain = judge_effect(compared(mean), spread=NARROW, run_differences=differences)
    loss = judge_effect(compared(-mean), spread=NARROW, run_differences=[-one for one in differences])
    assert gain.is_effect == loss.is_effect
    assert gain.missing == loss.missing
