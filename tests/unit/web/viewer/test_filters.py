"""An address holds a whole filter, and any address gives a filter."""

from urllib.parse import parse_qsl

from hypothesis import given, settings
from hypothesis import strategies as st

from osworld_pipeline.web.viewer.filters import FACETS, HIDDEN, SORTS, SPANS, TEXTS, EpisodeFilter

TEXT = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=20)
ENDS = st.none() | st.integers(-1000, 1000).map(float)
FILTERS = st.builds(
    EpisodeFilter,
    chosen=st.dictionaries(
        st.sampled_from([facet.name for facet in FACETS]),
        st.lists(TEXT, min_size=1, max_size=3, unique=True).map(tuple),
        max_size=3,
    ),
    spans=st.dictionaries(
        st.sampled_from([span.name for span in SPANS]),
        st.tuples(ENDS, ENDS).filter(lambda ends: ends != (None, None)),
        max_size=2,
    ),
    hidden=st.dictionaries(st.sampled_from(sorted(HIDDEN)), TEXT, max_size=1),
    texts=st.dictionaries(st.sampled_from(TEXTS), TEXT.map(str.strip).filter(bool), max_size=2),
    sort=st.sampled_from(sorted(SORTS)),
    page=st.integers(1, 10_000),
)


@settings(max_examples=60)
@given(FILTERS)
def test_a_filter_is_restored_from_its_address(chosen: EpisodeFilter) -> None:
    assert EpisodeFilter.from_query(parse_qsl(chosen.query())) == chosen


@given(st.lists(st.tuples(st.sampled_from([*TEXTS, "outcome", "turns_min", "reward_max", "page", "sort", "x"]), TEXT)))
def test_any_address_gives_a_filter_with_as_many_values_as_placeholders(pairs) -> None:
    chosen = EpisodeFilter.from_query(pairs)
    for condition, values in (chosen.condition(), chosen.words()):
        assert condition.count("?") == len(values)
    assert chosen.page >= 1
    assert chosen.sort in SORTS


@settings(max_examples=40)
@given(FILTERS, TEXT)
def test_a_value_that_is_toggled_twice_is_not_chosen(chosen: EpisodeFilter, value: str) -> None:
    once = chosen.toggled("outcome", value)
    assert once.toggled("outcome", value).chosen.get("outcome", ()) == tuple(
        kept for kept in chosen.chosen.get("outcome", ()) if kept != value
    ) or value in chosen.chosen.get("outcome", ())
    assert once.page == 1


def test_invalid_numbers_are_left_out() -> None:
    chosen = EpisodeFilter.from_query([("turns_min", "nan"), ("turns_max", "x"), ("reward_min", "0.5"), ("page", "-3")])
    assert chosen.spans == {"reward": (0.5, None)}
    assert chosen.page == 1
    assert chosen.query() == "reward_min=0.5"
