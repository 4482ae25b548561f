"""The list and the counts next to each facet, checked against counting by hand."""

from collections import Counter

import pytest

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.web.viewer.facets import EpisodeList, list_episodes, neighbours
from osworld_pipeline.web.viewer.filters import PAGE_SIZE, EpisodeFilter
from osworld_pipeline.web.viewer.index import EpisodeIndex
from osworld_pipeline.web.viewer.questions import Questions


@pytest.fixture
def index(sample_index: EpisodeIndex) -> EpisodeIndex:
    return sample_index


def listed(index: EpisodeIndex, *pairs: tuple[str, str]) -> EpisodeList:
    with index.reading() as reader:
        return list_episodes(reader, EpisodeFilter.from_query(pairs), "facts")


def all_rows(index: EpisodeIndex) -> list[dict]:
    with index.reading() as reader:
        return reader.dicts("SELECT * FROM facts")


def counts_of(found: EpisodeList, name: str) -> dict[str, int]:
    (facet,) = (one for one in found.facets if one.facet.name == name)
    return {value.value: value.count for value in facet.values}


def test_every_facet_counts_all_episodes_where_nothing_is_chosen(index: EpisodeIndex) -> None:
    rows, found = all_rows(index), listed(index)
    for counted in found.facets:
        column = counted.facet.column
        assert counts_of(found, counted.facet.name) == Counter(row[column] or "none" for row in rows), column
    assert found.total == found.num_known == len(rows)


def test_a_choice_in_a_facet_filters_the_counts_of_the_other_facets_but_not_its_own(index: EpisodeIndex) -> None:
    rows = [row for row in all_rows(index) if row["purpose"] == "evaluate"]
    found = listed(index, ("purpose", "evaluate"), ("outcome", "success"), ("outcome", "env_fault"))
    assert counts_of(found, "outcome") == Counter(row["outcome"] for row in rows)
    chosen = [row for row in rows if row["outcome"] in ("success", "env_fault")]
    assert counts_of(found, "checkpoint") == Counter(row["checkpoint_id"] for row in chosen)
    assert found.total == len(chosen)
    assert {row["outcome"] for row in found.rows} == {"success", "env_fault"}


def test_a_chosen_value_stays_shown_even_if_no_episode_has_it(index: EpisodeIndex) -> None:
    found = listed(index, ("outcome", "timeout"))
    assert (found.total, counts_of(found, "outcome")["timeout"]) == (0, 0)


def test_episodes_without_a_value_can_be_chosen(index: EpisodeIndex) -> None:
    found = listed(index, ("fault", "none"))
    assert found.total == sum(row["fault"] is None for row in all_rows(index))


def test_faults_that_differ_only_in_numbers_are_counted_as_one(index: EpisodeIndex) -> None:
    assert counts_of(listed(index), "fault")["replica local-# did not answer within # s"] == 1


def test_bars_hold_every_value_once_and_choosing_one_gives_its_count(index: EpisodeIndex) -> None:
    rows, found = all_rows(index), listed(index)
    for counted in found.spans:
        values = [row[counted.span.column] for row in rows] if counted.span.name != "update" else [
            row["update"] for row in rows if row["update"] >= 0
        ]  # fmt: skip
        present = [value for value in values if value is not None]
        assert sum(bar.count for bar in counted.bars) == len(present)
        if counted.span.is_whole:
            for bar in counted.bars:
                ends = ((f"{counted.span.name}_min", f"{bar.low:g}"), (f"{counted.span.name}_max", f"{bar.high:g}"))
                assert listed(index, *ends).total == bar.count


def test_pages_and_neighbours_follow_one_order(index: EpisodeIndex) -> None:
    chosen = EpisodeFilter.from_query([("sort", "task")])
    found = listed(index, ("sort", "task"))
    ids = [row["episode_id"] for row in found.rows]
    assert len(ids) == min(PAGE_SIZE, found.total)
    with index.reading() as reader:
        for place, name in enumerate(ids[:5]):
            before, after = neighbours(reader, chosen, "facts", name)
            assert before == (ids[place - 1] if place else None)
            assert after == ids[place + 1]
        assert neighbours(reader, chosen, "facts", "nobody") == (None, None)
    assert listed(index, ("page", "2")).rows == []


async def test_words_are_searched_for_in_instruction_id_and_fault(index: EpisodeIndex, sample_state: StateDir) -> None:
    questions = Questions(sample_state, index)
    for text, column in (("RENAME the folder", "instruction"), ("sort_list-0005", "task_id"), ("503", "error")):
        chosen = EpisodeFilter.from_query([("q", text)])
        source = await questions.source(chosen)
        with index.reading() as reader:
            found = list_episodes(reader, chosen, source)
            faceted = list_episodes(reader, chosen.toggled("outcome", "success"), source)
        assert found.total > 0
        assert all(text.lower() in row[column].lower() for row in found.rows)
        assert counts_of(faceted, "outcome") == counts_of(found, "outcome") | {"success": faceted.total}
