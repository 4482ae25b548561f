"""Metrics, by hand-worked examples of OSWorld's semantics."""

import difflib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osworld_pipeline.task_schema.context import ResultFile
from osworld_pipeline.task_schema.metrics import desktop as desktop
from osworld_pipeline.task_schema.metrics import files as files
from osworld_pipeline.task_schema.metrics import texts as texts


def a_file(text: str | bytes) -> ResultFile:
    return ResultFile(name="a", data=text if isinstance(text, bytes) else text.encode())


def test_exact_match_is_exact() -> None:
    assert texts.exact_match("a\n", {"expected": "a\n"}) == 1.0
    assert texts.exact_match("a", {"expected": "a\n"}) == 0.0
    assert texts.exact_match(None, {"expected": "a"}) == 0.0
    assert texts.exact_match({"width": 1}, {"expected": {"width": 1}}) == 1.0


def test_include_exclude_requires_every_included_text_and_no_excluded_text() -> None:
    rules = {"include": ["a", "b"], "exclude": ["c"]}
    assert [texts.check_include_exclude(result, rules) for result in ("xaxb", "xa", "abc", None)] == [1, 0, 0, 0]
    assert texts.check_include_exclude("", {"include": [], "exclude": ["c"]}) == 1.0
    assert texts.check_include_exclude("anything", {}) == 1.0


def test_is_in_list_searches_the_result_for_expected_and_match_in_list_searches_expected_for_it() -> None:
    assert texts.is_in_list(["a", "b"], {"expected": "a"}) == 1.0
    assert texts.is_in_list(["ab"], {"expected": "a"}) == 0.0
    assert texts.is_in_list(None, {"expected": "a"}) == 0.0
    assert texts.match_in_list("a", {"expected": ["a", "b"]}) == 1.0
    assert texts.match_in_list(None, {"expected": ["a"]}) == 0.0


def test_fuzzy_match_is_twice_the_common_subsequence_over_both_lengths() -> None:
    # "kitten"/"sitting": the longest common subsequence is "ittn", 4 of 6 + 7 characters.
    assert texts.fuzzy_match("kitten", {"expected": "sitting"}) == pytest.approx(8 / 13)
    assert texts.fuzzy_match("same", {"expected": "same"}) == 1.0
    assert texts.fuzzy_match("", {"expected": "a"}) == 0.0
    assert texts.fuzzy_match("", {"expected": ""}) == 1.0
    assert texts.fuzzy_match(None, {"expected": "a"}) == 0.0


def longest_common_subsequence(left: str, right: str) -> int:
    row = [0] * (len(right) + 1)
    for char in left:
        previous = row[:]
        for index, other in enumerate(right):
            row[index + 1] = previous[index] + 1 if char == other else max(previous[index + 1], row[index])
    return row[-1]


@given(st.text("abc", max_size=40), st.text("abc", max_size=40))
def test_fuzzy_ratio_equals_a_plain_dynamic_programming_solution(left: str, right: str) -> None:
    total = len(left) + len(right)
    expected = 2 * longest_common_subsequence(left, right) / total if total else 1.0
    assert texts.indel_ratio(left, right) == pytest.approx(expected)


def test_literal_match_ignores_case_only_with_ignore_case() -> None:
    assert texts.literal_match("A", "a") == 0.0
    assert texts.literal_match("A", "a", ignore_case=True) == 1.0
    assert texts.literal_match(["1", "B"], [1, "b"], type="list", ignore_case=True) == 1.0
    assert texts.literal_match("ab", ["a", "b"], type="list") == 0.0
    with pytest.raises(ValueError, match="not 'dict'"):
        texts.literal_match("a", "a", type="dict")


def test_clipboard_metric_takes_the_rule_as_its_first_argument() -> None:
    assert texts.is_in_vm_clickboard({"expected": "b"}, "abc") == 1.0
    assert texts.is_in_vm_clickboard({"expected": ["a", "z"]}, "abc") == 0.0


def test_direct_json_object_compares_the_expected_keys() -> None:
    assert texts.check_direct_json_object({"a": 1, "b": 2}, {"expected": {"a": 1}}) == 1.0
    assert texts.check_direct_json_object("{'a': '1'}", {"expected": {"a": "1"}}) == 1.0
    assert texts.check_direct_json_object({"a": 2}, {"expected": {"a": 1}}) == 0.0
    rules = {"expect_in_result": True, "expected": {"a": ["x", "y"], "b": "part"}}
    assert texts.check_direct_json_object({"a": ["y"], "b": "a part"}, rules) == 1.0
    assert texts.check_direct_json_object({"a": "z", "b": "a part"}, rules) == 0.0
    assert texts.check_direct_json_object(None, {"expected": {"a": 1}}) == 0.0


def test_text_files_are_equal_up_to_what_the_options_ignore() -> None:
    assert files.compare_text_file(a_file("a b\n"), a_file("a b\n")) == 1.0
    assert files.compare_text_file(a_file("a\r\nb"), a_file("a\nb")) == 1.0
    assert files.compare_text_file(a_file("a  b\n"), a_file("a b")) == 0.0
    assert files.compare_text_file(a_file("a \t b\n"), a_file("a b"), ignore_blanks=True) == 1.0
    assert files.compare_text_file(a_file("A"), a_file("a"), ignore_case=True) == 1.0
    assert files.compare_text_file(None, a_file("a")) == 0.0


def test_undecodable_bytes_score_0_in_the_result_and_raise_an_error_in_the_expected_file() -> None:
    assert files.compare_text_file(a_file(b"\xff"), a_file("a")) == 0.0
    with pytest.raises(UnicodeDecodeError):
        files.compare_text_file(a_file("a"), a_file(b"\xff"))


def test_diff_of_text_files_is_the_ratio_of_their_lines() -> None:
    assert files.diff_text_file(a_file("a\nb\nc"), a_file("a\nb\nd")) == pytest.approx(2 * 2 / 6)
    assert files.diff_text_file(None, a_file("a")) == 0.0
    assert difflib.SequenceMatcher(a=["a"], b=["a"]).ratio() == files.diff_text_file(a_file("a"), a_file("a"))


def test_result_files_are_equal_as_text_or_as_numbers() -> None:
    assert files.compare_result_files(a_file(" x\n"), a_file("x")) == 1.0
    assert files.compare_result_files(a_file("the answer is 42"), a_file("42")) == 1.0
    assert files.compare_result_files(a_file("3.00001"), a_file("3.0")) == 1.0
    assert files.compare_result_files(a_file("4"), a_file("3.0")) == 0.0
    assert files.compare_result_files(a_file("four"), a_file("4")) == 0.0


def test_file_contains_every_part() -> None:
    assert files.file_contains(a_file("ab"), {"expected": ["a", "b"]}) == 1.0
    assert files.file_contains(a_file("ab"), {"expected": ["a", "c"]}) == 0.0
    assert files.file_contains(None, {"expected": []}) == 0.0


def test_line_number_counts_lines_with_a_time() -> None:
    assert files.check_line_number(a_file("12:30:00 a\nno\n23:59:60\n24:00:00"), {"expected": "2"}) == 1.0
    assert files.check_line_number(None, {"expected": 0}) == 0.0


def test_list_requires_each_pattern_on_some_line() -> None:
    rules = {"expect": ["^a", "b$"], "unexpect": ["c"]}
    assert [files.check_list(a_file(text), rules) for text in ("a\nb", "a", "a\nb\nc")] == [1, 0, 0]


def test_json_metric_reads_yaml_with_is_yaml() -> None:
    rules = {"expect": [{"key": ["author", "name"], "method": "eq", "ref": "Ada"}]}
    assert files.check_json(a_file("author:\n  name: Ada\n"), rules, is_yaml=True) == 1.0
    assert files.check_json(a_file("author:\n  name: Bob\n"), rules, is_yaml=True) == 0.0
    assert files.check_json(a_file("author:\n  name: Ada\n"), rules) == 0.0
    for broken in ("author: [", "", "born: 1815-13-45", "author: Ada", "!!python/object/apply:os.getcwd []"):
        assert files.check_json(a_file(broken), rules, is_yaml=True) == 0.0


def test_csv_requires_a_record_with_the_expected_values() -> None:
    rules = {"expect": [{"name": "x"}], "unexpect": [{"age": "9"}]}
    assert files.check_csv(a_file("name,age\nx,1\n"), rules) == 1.0
    assert files.check_csv(a_file("name,age\nx,9\n"), rules) == 0.0
    assert files.check_csv(None, rules) == 0.0


@pytest.mark.parametrize(
    ("method", "ref", "value", "holds"),
    [
        ("eq", 1, "1", True), ("ne", 1, "1", False), ("lt", 2, "1", True), ("ge", 2, "1", False),
        ("re", "^a", '"abc"', True), ("re.I", "^A", '"abc"', True), ("re", "^a", "1", False),
        ("approx:0.1", 1.0, "1.05", True), ("approx:0.1", 1.0, "1.2", False), ("approx:0.1", 1.0, '"x"', False),
        ("range.te", [0, 2], "2", True), ("range.tt", [0, 2], "2", False), ("lt", 2, '"x"', False),
    ],
)  # fmt: skip
def test_json_value_at_a_path_is_checked_by_its_rule(method: str, ref: object, value: str, holds: bool) -> None:
    rules = {"expect": [{"key": ["a", 0], "method": method, "ref": ref}]}
    assert files.check_json(a_file(f'{{"a": [{value}]}}'), rules) == float(holds)


def test_json_that_is_none_or_lacks_the_key_scores_0_and_an_unknown_method_raises() -> None:
    rules = {"expect": [{"key": ["a"], "method": "eq", "ref": 1}]}
    assert files.check_json(a_file("no json"), rules) == 0.0
    assert files.check_json(a_file("{}"), rules) == 0.0
    assert files.check_json(a_file('{"a": 1}'), {"unexpect": rules["expect"]}) == 0.0
    with pytest.raises(ValueError, match="has no method"):
        files.check_json(a_file('{"a": 1}'), {"expect": [{"key": ["a"], "method": "like", "ref": 1}]})


def test_text_counts_as_enlarged_with_a_factor_above_1() -> None:
    assert [desktop.check_text_enlarged(text) for text in ("1.25\n", "1.0\n", "0.8")] == [1, 0, 0]
    with pytest.raises(ValueError, match="could not convert"):
        desktop.check_text_enlarged("")


def test_the_utc_offset_is_read_from_the_fourth_line() -> None:
    report = "Local time: x\nUniversal time: x\nRTC time: x\nTime zone: Atlantic/Faroe (WET, {})\nNTP: no"
    assert desktop.is_utc_0(report.format("+0000")) == 1.0
    assert desktop.is_utc_0(report.format("+0100")) == 0.0


def test_favourite_apps_are_compared_as_a_set() -> None:
    rules = {"expected": ["a.desktop", "b.desktop"]}
    assert desktop.check_gnome_favorite_apps("['b.desktop', 'a.desktop']\n", rules) == 1.0
    assert desktop.check_gnome_favorite_apps("['b.desktop']", rules) == 0.0
    assert desktop.check_gnome_favorite_apps("@as []", rules) == 0.0
    with pytest.raises((SyntaxError, ValueError)):
        desktop.check_gnome_favorite_apps("__import__('os').getpid()", rules)


def test_moved_pictures_are_exactly_the_expected_names() -> None:
    tree = {"type": "directory", "name": "d", "children": [{"name": "a.jpg"}, {"name": "b.jpg"}]}
    assert desktop.check_moved_jpgs(tree, {"expected": ["b.jpg", "a.jpg"]}) == 1.0
    assert desktop.check_moved_jpgs(tree, {"expected": ["a.jpg"]}) == 0.0
    assert desktop.check_moved_jpgs(None, {"expected": []}) == 0.0
