"""A demonstration whose images are too large is shrunk with its points; one that fits stays unchanged."""

import io
from typing import Any

import pytest
from PIL import Image

from osworld_pipeline.agent.fit_demonstration import fit_demonstration
from osworld_pipeline.agent.observation_text import assistant_message, user_message
from osworld_pipeline.dialects import load_dialect

DIALECT = load_dialect("slime")
LIMIT = 1_003_520


def png(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height)).save(buffer, format="PNG")
    return buffer.getvalue()


def turn(action: dict[str, Any], *, words: str = "Do it") -> dict[str, Any]:
    return assistant_message(DIALECT.format(words, action))


def action_of(message: Any) -> Any:
    return DIALECT.parse_strict(message["content"][0]["text"]).arguments


CLICK = {"action": "left_click", "coordinate": [960, 540]}
DRAG = {"action": "left_click_drag", "end_coordinate": [1919, 1079]}


def test_a_demonstration_that_fits_stays_unchanged() -> None:
    # Our formatter would not write the turn like this, so a rewritten turn would differ.
    loose = assistant_message('action: Action: x\n<answer>{"action": "left_click", "coordinate": [3, 4]}</answer>')
    messages = [user_message("a"), loose]
    fitted, images = fit_demonstration(messages, [png(640, 352)], dialect=DIALECT, max_pixels=LIMIT)
    assert (fitted, images) == (messages, [png(640, 352)])


def test_points_move_with_an_image_that_is_shrunk() -> None:
    messages = [user_message("a"), turn(CLICK), user_message(""), turn(DRAG, words="Drag there")]
    fitted, images = fit_demonstration(messages, [png(1920, 1080)] * 2, dialect=DIALECT, max_pixels=LIMIT)
    sizes = [Image.open(io.BytesIO(image)).size for image in images]
    assert sizes == [(1312, 736)] * 2
    assert action_of(fitted[1]) == {"action": "left_click", "coordinate": [656, 368]}
    assert action_of(fitted[3]) == {"action": "left_click_drag", "end_coordinate": [1311, 735]}
    assert fitted[3]["content"][0]["text"].startswith("Action: Drag there\n")
    assert [message["role"] for message in fitted] == ["user", "assistant"] * 2


def test_an_image_side_that_patches_do_not_divide_moves_points_too() -> None:
    messages = [user_message("a"), turn({"action": "mouse_move", "coordinate": [1275, 717]})]
    fitted, _ = fit_demonstration(messages, [png(1276, 718)], dialect=DIALECT, max_pixels=LIMIT)
    assert action_of(fitted[1])["coordinate"] == [1279, 703]


def test_each_turn_refers_to_the_newest_image_before_it() -> None:
    blind = {"role": "user", "content": [{"type": "text", "text": "no screen"}]}
    messages = [blind, turn(CLICK), user_message("a"), turn(CLICK), blind, turn(CLICK), user_message(""), turn(CLICK)]
    fitted, _ = fit_demonstration(messages, [png(1920, 1080), png(1280, 704)], dialect=DIALECT, max_pixels=LIMIT)
    assert [action_of(fitted[index])["coordinate"] for index in (1, 3, 5, 7)] == [
        [960, 540], [656, 368], [656, 368], [960, 540],
    ]  # fmt: skip


def test_actions_without_a_point_stay_unchanged() -> None:
    messages = [user_message("a"), turn({"action": "type", "text": "[3, 4]"})]
    fitted, _ = fit_demonstration(messages, [png(1920, 1080)], dialect=DIALECT, max_pixels=LIMIT)
    assert fitted == messages


@pytest.mark.parametrize("num_images", [0, 2])
def test_placeholders_and_images_must_agree(num_images: int) -> None:
    with pytest.raises(ValueError, match="image placeholders"):
        fit_demonstration(
            [user_message("a"), turn(CLICK)], [png(64, 64)] * num_images, dialect=DIALECT, max_pixels=LIMIT
        )


@pytest.mark.parametrize("space", ["unit", "thousand"])
@pytest.mark.parametrize("name", ["slime", "pyautogui", "osgym"])
def test_points_of_another_coordinate_space_move_to_the_same_place(name: str, space: str) -> None:
    target = load_dialect(name, space)
    messages = [user_message("a"), turn(CLICK, words="Click there")]
    fitted, _ = fit_demonstration(messages, [png(1920, 1080)], dialect=DIALECT, max_pixels=LIMIT, target=target)
    said = target.parse_strict(fitted[1]["content"][0]["text"])
    assert said.arguments == {"action": "left_click", "coordinate": [0.5, 0.5] if space == "unit" else [500, 500]}
    assert said.description == "Click there"
    back, _ = fit_demonstration(fitted, [png(1920, 1080)], dialect=target, max_pixels=LIMIT, target=DIALECT)
    assert action_of(back[1]) == {"action": "left_click", "coordinate": [656, 368]}


def test_relative_coordinates_stay_unchanged_at_any_size() -> None:
    unit = load_dialect("slime@unit")
    messages = [
        user_message("a"),
        assistant_message(unit.format("x", {"action": "left_click", "coordinate": [0.3, 1]})),
    ]
    fitted, _ = fit_demonstration(messages, [png(1920, 1080)], dialect=unit, max_pixels=LIMIT)
    assert fitted == messages


def test_a_turn_without_an_image_to_point_at_cannot_be_translated() -> None:
    with pytest.raises(ValueError, match="there is no image before it"):
        fit_demonstration([turn(CLICK)], [], dialect=DIALECT, max_pixels=LIMIT, target=load_dialect("osgym"))
