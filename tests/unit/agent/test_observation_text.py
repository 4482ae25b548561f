"""The text next to a screenshot: order, headings, cuts, and what later turns leave out."""

from osworld_pipeline.agent.observation_text import LastAction, cut_text, observation_text, user_message
from osworld_pipeline.domain.observation import Observation
from osworld_pipeline.domain.task import Task

TASK = Task(task_id="t", instruction="Rename alpha to bravo.", domain="os", config={})


def render(observation: Observation, *, step_index: int = 0, last_action: LastAction | None = None) -> str:
    return observation_text(observation, TASK, step_index=step_index, last_action=last_action, a11y_max_length=10)


def test_every_part_is_in_order_under_its_heading() -> None:
    observation = Observation(screenshot=b"", accessibility_tree="tree", terminal="$ ls")
    assert render(observation, last_action=LastAction()) == (
        "[Domain hint]\nos\n[Task]\nRename alpha to bravo.\n[Accessibility Tree]\ntree\n[Terminal Output]\n$ ls\n"
        "[Last Action Result]\nok"
    )


def test_a_later_turn_repeats_neither_task_nor_hint() -> None:
    text = render(Observation(screenshot=b""), step_index=1, last_action=LastAction(error="no such key"))
    assert text == "[Last Action Result]\nerror: no such key"


def test_absent_parts_have_no_heading() -> None:
    assert render(Observation(screenshot=b"")) == "[Domain hint]\nos\n[Task]\nRename alpha to bravo."


def test_a_long_tree_is_cut_and_marked() -> None:
    text = render(Observation(screenshot=b"", accessibility_tree="0123456789abc"), step_index=1)
    assert text == "[Accessibility Tree]\n0123456789\n... (truncated)"


def test_text_of_exactly_the_limit_is_not_marked() -> None:
    assert cut_text("0123456789", 10) == "0123456789"


def test_a_long_terminal_keeps_its_end() -> None:
    text = render(Observation(screenshot=b"", terminal="x" * 5000 + "END"), step_index=1)
    assert text.endswith("END")
    assert "(truncated)" in text
    assert len(text) < 2100


def test_an_observation_without_text_is_an_image_alone() -> None:
    assert user_message("") == {"role": "user", "content": [{"type": "image"}]}
