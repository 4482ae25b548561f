"""The checkers of Windows files give the Windows example's scores for every encoding and line end of a program."""

import codecs

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from osworld_pipeline.task_schema.context import ResultFile
from osworld_pipeline.task_schema.metrics import METRICS
from osworld_pipeline.task_schema.metrics import windows as checkers
from osworld_pipeline.task_schema.metrics.windows import windows_text

MARKED = {
    "utf-8": codecs.BOM_UTF8,
    "utf-16-le": codecs.BOM_UTF16_LE,
    "utf-16-be": codecs.BOM_UTF16_BE,
}
texts = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\x00\r\ufeff"), max_size=60)
latin = st.text(st.characters(min_codepoint=1, max_codepoint=0xFF, exclude_characters="\r"), min_size=1, max_size=60)


def a_file(data: str | bytes) -> ResultFile:
    return ResultFile(name="a", data=data if isinstance(data, bytes) else data.encode())


@settings(max_examples=60, deadline=None)
@given(texts, st.sampled_from([*MARKED, "plain"]), st.booleans())
def test_text_is_the_same_in_every_encoding_and_with_either_line_end(text: str, encoding: str, has_crlf: bool) -> None:
    written = text.replace("\n", "\r\n") if has_crlf else text
    data = written.encode() if encoding == "plain" else MARKED[encoding] + written.encode(encoding)
    assert windows_text(data) == text


@settings(max_examples=60, deadline=None)
@given(latin, st.sampled_from(["utf-16-le", "utf-16-be"]))
def test_utf_16_without_a_byte_order_mark_is_recognised_by_its_zero_bytes(text: str, encoding: str) -> None:
    assert windows_text(text.encode(encoding)) == text


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=80))
def test_any_bytes_are_decoded_to_text(data: bytes) -> None:
    assert "\r" not in windows_text(data)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=80), st.sampled_from(["exact_match", "date_format", "names_listed", "non_empty", "has_all"]))
def test_any_file_gets_one_of_the_defined_scores(data: bytes, name: str) -> None:
    metric = METRICS[f"windows_{name}"]
    rules = {rule.name: "target" if name == "exact_match" else ["windows", "users"] for rule in metric.rules}
    assert metric(a_file(data), rules) in {0.0, 0.1, 0.2, 0.5, 1.0}


def test_bytes_that_are_not_utf_8_are_decoded_as_windows_1252() -> None:
    assert windows_text(b"caf\xe9 \x80") == "café €"


def test_an_incomplete_character_at_the_end_loses_only_that_character() -> None:
    assert windows_text(codecs.BOM_UTF16_LE + "ab".encode("utf-16-le")[:-1]) == "a\ufffd"


@pytest.mark.parametrize(
    ("content", "score"),
    [
        ("The river runs.", 1.0), ("  The river runs.\r\n", 1.0), ("\ufeffThe river runs.", 1.0),
        ("I wrote: the RIVER runs. Done", 0.5), ("The river", 0.2), (" \r\n", 0.0), ("", 0.0),
    ],
)  # fmt: skip
def test_exact_match_gives_half_for_a_target_in_other_text_and_a_fifth_for_any_text(content: str, score: float) -> None:
    assert checkers.windows_exact_match(a_file(content), {"expected": "The river runs."}) == score


@pytest.mark.parametrize("data", [b"a\r\nb\r\nc", b"a \r\nb \r\nc \r\n", "a\nb\nc\n".encode("utf-16")])
def test_several_lines_match_with_any_line_ends(data: bytes) -> None:
    assert checkers.windows_exact_match(a_file(data), {"expected": "a\nb\nc"}) == 1.0


@pytest.mark.parametrize("target", ["", " \n"])
def test_a_blank_target_is_an_error_and_does_not_score_half_for_any_text(target: str) -> None:
    with pytest.raises(ValueError, match="blank"):
        checkers.windows_exact_match(a_file("anything"), {"expected": target})


@pytest.mark.parametrize("names", [[], [" "]])
def test_blank_names_are_an_error_too(names: list[str]) -> None:
    for checker in (checkers.windows_has_all, checkers.windows_names_listed):
        with pytest.raises(ValueError, match="missing or blank"):
            checker(a_file("anything"), {"expected": names})


@pytest.mark.parametrize(
    ("content", "score"),
    [
        ("2026-11-22", 1.0), ("2026-11-22\r\n", 1.0), ("Today is 2026-11-22.", 0.5), ("11/22/2026", 0.1),
        ("12026-11-22", 0.1), ("２０２６-11-22", 0.1), ("", 0.0),
    ],
)  # fmt: skip
def test_a_date_scores_in_full_alone_and_half_among_other_text(content: str, score: float) -> None:
    assert checkers.windows_date_format(a_file(content), {}) == score


@pytest.mark.parametrize(
    ("content", "score"),
    [("Windows\r\nUsers\r\n", 1.0), ("<DIR> PROGRAM FILES  windows", 1.0), ("users", 0.5), ("nothing", 0.1), ("", 0.0)],
)
def test_two_names_of_a_listing_are_enough_for_the_full_score(content: str, score: float) -> None:
    rules = {"expected": ["windows", "users", "program files"]}
    assert checkers.windows_names_listed(a_file(content), rules) == score
    assert checkers.windows_names_listed(a_file(content.encode("utf-16-le")), rules) == score


@pytest.mark.parametrize(("content", "score"), [("step1\r\nstep2", 1.0), ("step2", 0.5), ("step", 0.1), ("\t", 0.0)])
def test_both_words_are_required_and_one_scores_half(content: str, score: float) -> None:
    assert checkers.windows_has_all(a_file(content), {"expected": ["step1", "step2"]}) == score


def test_a_file_that_is_missing_scores_nothing() -> None:
    rules = {"expected": "x"}
    assert checkers.windows_exact_match(None, rules) == checkers.windows_has_all(None, rules) == 0.0
    assert checkers.windows_non_empty(None, {}) == checkers.windows_date_format(None, {}) == 0.0
    assert checkers.windows_non_empty(a_file(" x "), {}) == 1.0
