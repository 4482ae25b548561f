"""The table of importance forms: bias and noise are those of the samples, and the exact form is exact."""

import pytest

from benchmarks import importance_forms
from benchmarks.importance_forms import FORMS, measure


@pytest.fixture(autouse=True)
def few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importance_forms, "NUM_SEQUENCES", 8000)


@pytest.mark.parametrize(("name", "form", "low", "high"), FORMS)
def test_on_policy_no_form_has_a_bias(name: str, form, low: float, high: float):
    outcome = measure(10, 0.0, form, low, high, seed=1)
    assert outcome.bias < 0.05
    assert outcome.effective_share == pytest.approx(1.0)


def test_far_off_policy_the_whole_sequence_s_weight_has_no_bias_and_the_most_noise():
    exact = measure(6, 0.3, "sequence_truncate", 0.0, 1e9, seed=1)
    tokens = measure(6, 0.3, "token_truncate", 0.0, 2.0, seed=1)
    nothing = measure(6, 0.3, "none", 0.0, 2.0, seed=1)
    assert exact.bias < tokens.bias < nothing.bias
    assert exact.noise > tokens.noise
