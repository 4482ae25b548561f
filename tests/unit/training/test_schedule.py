"""The learning rate of an update, by hand."""

import pytest

from osworld_pipeline.recipes.schema import GspoSharedSection, SftSection
from osworld_pipeline.training.schedule import learning_rate_at


@pytest.mark.parametrize("section", [SftSection, GspoSharedSection])
def test_the_learning_rate_warms_up_and_decays(section):
    own = {"num_updates": 13} if section is SftSection else {}
    settings = section(learning_rate=1.0, warmup_updates=2, final_lr_fraction=0.1, **own)
    rates = [learning_rate_at(settings, update, num_updates=13) for update in range(13)]
    assert rates[:3] == pytest.approx([0.5, 1.0, 1.0])
    assert rates[7] == pytest.approx(0.55)  # half of the cosine: the middle of 1.0 and 0.1
    assert rates[12] == pytest.approx(0.1)
    assert rates[2:] == sorted(rates[2:], reverse=True)


def test_the_learning_rate_of_gspo_is_constant_by_default():
    assert {learning_rate_at(GspoSharedSection(), update, num_updates=9) for update in range(9)} == {5e-7}


def test_a_run_of_one_update_has_a_learning_rate():
    assert learning_rate_at(SftSection(num_updates=1, learning_rate=1.0, warmup_updates=0), 0, num_updates=1) == 1.0
