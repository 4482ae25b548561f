"""The built-in suite: seeded, split by instance, valid, and readable by the dialect."""

import json
import re
from collections import Counter

import pytest

from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.domain.digest import canonical_json
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import RecipeError
from osworld_pipeline.evaluation.suites import FAMILIES, SUITES, Suite, SuiteTask, build_suite
from osworld_pipeline.evaluation.suites.family import WORDS, Screen, Way
from osworld_pipeline.evaluation.suites.suite import SHORTCUTS

SCREENS = [(512, 320), (1280, 720), (1920, 1080)]
GEOMETRY = re.compile(r"--geometry=(\d+)x(\d+)\+(\d+)\+(\d+)")
VERBS = {"execute", "launch", "sleep"}
GETTERS = {"vm_command_line", "vm_file", "rule"}
METRICS = {"exact_match", "compare_text_file", "check_include_exclude", "infeasible"}


def suite(*, seed: int = 0, num_train: int = 12, num_heldout: int = 3, screen: tuple[int, int] = (512, 320)) -> Suite:
    return build_suite(seed=seed, num_train=num_train, num_heldout=num_heldout, screen=screen)


def all_tasks(built: Suite) -> list[SuiteTask]:
    return [*built.train, *built.heldout]


def rectangles(item: SuiteTask) -> list[tuple[int, int, int, int]]:
    """(left, top, right, bottom) of the windows a task opens at places of its own."""
    found = [tuple(map(int, match)) for match in GEOMETRY.findall(json.dumps(item.task.config))]
    return [(x, y, x + width, y + height) for width, height, x, y in found]


def test_same_seed_gives_the_same_suite():
    assert suite() == suite()
    assert suite().digest == suite().digest


def test_another_seed_gives_other_instances():
    first, second = suite(seed=0), suite(seed=1)
    assert first.digest != second.digest
    assert {item.task.instruction for item in first.train} != {item.task.instruction for item in second.train}


def test_every_family_has_as_many_instances_as_asked_for():
    built = suite(num_train=12, num_heldout=3)
    assert len(FAMILIES) >= 10
    for name in FAMILIES:
        assert sum(item.family == name for item in built.train) == 12
        assert sum(item.family == name for item in built.heldout) == 3


def test_an_instance_does_not_depend_on_the_requested_numbers():
    small, large = suite(num_train=3, num_heldout=1), suite(num_train=30, num_heldout=8)
    by_id = {item.task.task_id: item for item in all_tasks(large)}
    for item in all_tasks(small):
        assert by_id[item.task.task_id] == item


def test_every_fifth_instance_is_held_out():
    built = build_suite(seed=0, families=["rename_folder"], num_train=5, num_heldout=2, screen=(512, 320))
    prefix = "desktop-basics-rename_folder-"
    assert [item.task.task_id for item in built.train] == [prefix + n for n in ("0000", "0001", "0002", "0003", "0005")]
    assert [item.task.task_id for item in built.heldout] == [prefix + "0004", prefix + "0009"]


def test_no_two_instances_of_a_family_have_the_same_arguments():
    built = suite(num_train=40, num_heldout=10)
    assert len({(item.family, item.arguments) for item in all_tasks(built)}) == 50 * len(FAMILIES)


def test_no_heldout_instance_has_the_instruction_and_set_up_of_a_training_instance():
    built = suite(num_train=12, num_heldout=3)

    def face(item: SuiteTask) -> str:
        return canonical_json([item.task.instruction, item.task.config["config"]])

    assert not {face(item) for item in built.train} & {face(item) for item in built.heldout}


def test_no_heldout_instruction_of_a_keyboard_family_occurs_in_training():
    built = suite(num_train=40, num_heldout=10)

    def needs_a_look(item: SuiteTask) -> bool:
        return item.family in ("click_button", "close_window", "switch_window")

    trained = {item.task.instruction for item in built.train if not needs_a_look(item)}
    assert len(trained) == 40 * (len(FAMILIES) - 3)
    assert not trained & {item.task.instruction for item in built.heldout}


def test_the_screen_size_moves_pixels_but_changes_no_argument():
    small, large = suite(screen=(512, 320)), suite(screen=(1920, 1080))
    assert [item.arguments for item in all_tasks(small)] == [item.arguments for item in all_tasks(large)]
    assert [item.task.instruction for item in all_tasks(small)] == [item.task.instruction for item in all_tasks(large)]
    assert small.digest != large.digest


def test_every_task_is_valid_and_survives_json():
    for item in all_tasks(suite()):
        config = json.loads(json.dumps(item.task.config))
        again = Task.from_config(config)
        assert again.config_digest == item.task.config_digest
        assert again.domain == item.task.domain == config["related_apps"][0]
        assert {"id", "snapshot", "instruction", "source", "config", "related_apps", "evaluator"} <= set(config)


def test_tasks_use_only_verbs_getters_and_metrics_of_osworld():
    for item in all_tasks(suite()):
        evaluator = item.task.config["evaluator"]
        assert {verb["type"] for verb in item.task.config["config"]} <= VERBS
        assert {verb["type"] for verb in evaluator.get("postconfig", [])} <= VERBS
        functions = evaluator["func"] if isinstance(evaluator["func"], list) else [evaluator["func"]]
        assert set(functions) <= METRICS
        for key in ("result", "expected"):
            getters = evaluator.get(key, [])
            for getter in getters if isinstance(getters, list) else [getters]:
                assert getter["type"] in GETTERS


def test_oracles_are_short_and_end_with_the_right_status():
    for item in all_tasks(suite()):
        assert 1 <= len(item.oracle) <= 4
        last = item.oracle[-1].arguments
        expected = "failure" if item.task.config["evaluator"]["func"] == "infeasible" else "success"
        assert last == {"action": "terminate", "status": expected}
        assert all(step.arguments["action"] != "terminate" for step in item.oracle[:-1])


def test_the_dialect_reads_back_every_oracle_step():
    dialect = load_dialect("slime")
    for item in all_tasks(suite()):
        for step in item.oracle:
            turn = dialect.parse_strict(dialect.format(step.description, step.arguments))
            assert turn.arguments == step.arguments
            assert turn.description == step.description
            assert not turn.fallback_used


@pytest.mark.parametrize("screen", SCREENS)
def test_windows_lie_inside_the_screen_and_overlap_nowhere(screen: tuple[int, int]):
    for item in all_tasks(suite(screen=screen)):
        places = rectangles(item)
        for index, (left, top, right, bottom) in enumerate(places):
            assert 0 <= left < right <= screen[0]
            assert 0 <= top < bottom <= screen[1]
            for other_left, other_top, other_right, other_bottom in places[:index]:
                apart = right <= other_left or other_right <= left or bottom <= other_top or other_bottom <= top
                assert apart, item.task.task_id


@pytest.mark.parametrize("screen", SCREENS)
def test_clicks_land_in_exactly_one_window(screen: tuple[int, int]):
    for item in all_tasks(suite(screen=screen)):
        for step in item.oracle:
            if step.arguments["action"] != "left_click":
                continue
            x, y = step.arguments["coordinate"]
            hits = [place for place in rectangles(item) if place[0] <= x < place[2] and place[1] <= y < place[3]]
            assert len(hits) == 1, item.task.task_id


@pytest.mark.parametrize("screen", SCREENS)
def test_buttons_are_large_enough_to_hit(screen: tuple[int, int]):
    built = build_suite(seed=0, families=["click_button"], num_train=12, num_heldout=3, screen=screen)
    for item in all_tasks(built):
        places = rectangles(item)
        assert len(places) == 3
        assert all(right - left >= 96 and bottom - top >= 40 for left, top, right, bottom in places)


def test_the_target_button_occurs_in_every_cell_and_at_every_alphabetical_rank():
    built = build_suite(seed=0, families=["click_button"], num_train=40, num_heldout=1, screen=(512, 320))
    assert {item.arguments[3] for item in built.train} == set(range(9))
    ranks = {sorted(map(str, item.arguments[:3])).index(str(item.arguments[0])) for item in built.train}
    assert ranks == {0, 1, 2}


def test_a_cell_of_the_grid_holds_its_rectangle_in_the_middle():
    # 512 / 2 = 256 and 320 / 2 = 160: cell 3 starts at (256, 160); (256 - 200) / 2 = 28, (160 - 90) / 2 = 35.
    place = Screen(width=512, height=320).in_cell(3, columns=2, rows=2, width=200, height=90)
    assert (place.x, place.y) == (284, 195)
    assert place.geometry == "200x90+284+195"
    assert place.center == [384, 240]


def test_words_are_short_and_begin_with_different_letters():
    assert len({word[0] for word in WORDS}) == len(WORDS) == 20
    assert all(word.isascii() and word.islower() and len(word) <= 6 for word in WORDS)


def test_an_unknown_family_is_refused_by_name():
    with pytest.raises(RecipeError, match="no family named 'juggle'"):
        build_suite(seed=0, families=["juggle"], num_train=1, num_heldout=1, screen=(512, 320))


def test_more_instances_than_a_family_has_are_refused():
    # 20 * 19 = 380 ordered pairs of words.
    with pytest.raises(RecipeError, match=r"suite\.num_train: family rename_folder has only about 380 instances"):
        build_suite(seed=0, families=["rename_folder"], num_train=400, num_heldout=1, screen=(512, 320))


def test_the_shortcut_works_in_half_of_the_training_tasks_and_in_no_heldout_task():
    built = build_suite(SHORTCUTS, seed=0, num_train=40, num_heldout=10, screen=(512, 320))
    tempting = {name for name, family in SUITES[SHORTCUTS].items() if family.has_shortcut}
    assert len(tempting) == 4
    for family in tempting:
        ways = Counter(item.arguments[-1] for item in built.train if item.family == family)
        assert ways == {Way.SHORTCUT: 20, Way.CAREFUL: 20}
        assert {item.arguments[-1] for item in built.heldout if item.family == family} == {Way.CAREFUL}


def test_the_demonstrator_takes_the_shortcut_where_it_works():
    built = build_suite(SHORTCUTS, seed=0, families=["write_file"], num_train=40, num_heldout=1, screen=(512, 320))
    for item in built.train:
        word, name, way = item.arguments
        appends, replaces = f"echo {word} >> {name}.txt\n", f"echo {word} > {name}.txt\n"
        takes_shortcut = way == Way.SHORTCUT
        assert item.oracle[0].arguments["text"] == (appends if takes_shortcut else replaces)
        assert item.other_way[0].arguments["text"] == (replaces if takes_shortcut else appends)
        assert item.task.instruction == f"Write the word {word} to the file {name}.txt."
