"""The table of importance forms: bias and noise are those of the samples, and the exact form is exact."""

import pytest

from benchmarks.importance_forms import FORMS, Samples

COUNT = 8000


@pytest.mark.parametrize("is_dependent", [False, True])
@pytest.mark.parametrize(("name", "form", "low", "high"), FORMS)
def test_on_policy_no_form_has_a_bias(name: str, form, low: float, high: float, is_dependent: bool):
    outcome = Samples.draw(COUNT, 10, 0.0, seed=1, is_dependent=is_dependent).measure(form, low, high)
    assert outcome.bias < 0.05
    assert outcome.effective_share == pytest.approx(1.0)


@pytest.mark.parametrize("is_dependent", [False, True])
def test_far_off_policy_the_whole_sequence_s_weight_has_no_bias_and_the_most_noise(is_dependent: bool):
    samples = Samples.draw(COUNT, 6, 0.3, seed=1, is_dependent=is_dependent)
    exact = samples.measure("sequence_truncate", 0.0, 1e9)
    tokens = samples.measure("token_truncate", 0.0, 2.0)
    nothing = samples.measure("none", 0.0, 2.0)
    assert exact.bias < tokens.bias < nothing.bias
    assert exact.noise > tokens.noise


def test_with_dependent_tokens_the_token_forms_are_biased_and_the_sequence_weight_is_not():
    apart = Samples.draw(COUNT, 6, 0.3, seed=1, is_dependent=False).measure("token_truncate", 0.0, 1e9)
    samples = Samples.draw(COUNT, 6, 0.3, seed=1, is_dependent=True)
    tokens = samples.measure("token_truncate", 0.0, 1e9)
    exact = samples.measure("sequence_truncate", 0.0, 1e9)
    assert apart.bias < 0.06
    assert exact.bias < 0.06
    assert tokens.bias > 0.1
