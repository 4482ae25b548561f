"""The list of episodes and the counts of each facet: for every value, the number of episodes if only this value of the
facet were chosen, with the current choices of the other facets."""

from dataclasses import dataclass
from typing import Any

from osworld_pipeline.web.viewer.filters import FACETS, NOTHING, PAGE_SIZE, SORTS, SPANS, EpisodeFilter, Facet, Span
from osworld_pipeline.web.viewer.index import Reader

MAX_VALUES = 40
NUM_SHOWN = 8
NUM_BARS = 8
_LIST_COLUMNS = (
    "episode_id", "task_id", "instruction", "outcome", "error", "is_valid", "task_reward", "shaped_reward", "num_steps",
    "max_turns", "stage", "checkpoint_id", "purpose", "stage_key", '"update"', "group_id", "seed", "attempt", "reading",
    "num_unread", "started_at", "total_s",
)  # fmt: skip
_BARS = """
WITH v AS (SELECT {column} AS value FROM {source} WHERE {condition}),
ends AS (SELECT min(value) AS low, max(value) AS high FROM v)
SELECT low, high,
       CASE WHEN high > low THEN least(floor((value - low) / (high - low) * {bars}), {bars} - 1) ELSE 0 END AS bar,
       count(value) AS n
FROM v, ends WHERE value IS NOT NULL GROUP BY ALL
"""


@dataclass(frozen=True, kw_only=True)
class FacetValue:
    value: str
    count: int
    is_chosen: bool


@dataclass(frozen=True, kw_only=True)
class CountedFacet:
    facet: Facet
    values: tuple[FacetValue, ...]
    """Chosen ones first, then by count; at most MAX_VALUES, but always all chosen ones."""
    num_values: int


@dataclass(frozen=True, kw_only=True)
class Bar:
    low: float
    high: float
    """Both inclusive."""
    count: int


@dataclass(frozen=True, kw_only=True)
class CountedSpan:
    span: Span
    bars: tuple[Bar, ...]
    low: float | None
    high: float | None
    """Range of all values that could be chosen; None if no episode has a value."""


@dataclass(frozen=True, kw_only=True)
class EpisodeList:
    rows: list[dict[str, Any]]
    total: int
    """Episodes on all pages."""
    num_known: int
    """Episodes in the store."""
    facets: tuple[CountedFacet, ...]
    spans: tuple[CountedSpan, ...]

    @property
    def num_pages(self) -> int:
        return max(1, -(-self.total // PAGE_SIZE))


def list_episodes(reader: Reader, chosen: EpisodeFilter, source: str) -> EpisodeList:
    """One page of the episodes, with the facets. `source`: as Questions.source."""
    condition, values = chosen.condition()
    rows = reader.dicts(
        f"SELECT {', '.join(_LIST_COLUMNS)} FROM {source} WHERE {condition} ORDER BY {SORTS[chosen.sort]} "  # noqa: S608
        f"LIMIT {PAGE_SIZE} OFFSET {PAGE_SIZE * (chosen.page - 1)}",
        values,
    )
    total = reader.rows(f"SELECT count(*) FROM {source} WHERE {condition}", values)[0][0]  # noqa: S608 - our own names
    known = reader.rows("SELECT count(*) FROM facts")[0][0]
    return EpisodeList(
        rows=rows,
        total=total,
        num_known=known,
        facets=_facets(reader, chosen, source),
        spans=_spans(reader, chosen, source),
    )


def neighbours(reader: Reader, chosen: EpisodeFilter, source: str, episode_id: str) -> tuple[str | None, str | None]:
    """The episodes before and after this one in the list; None at its ends, or if the list does not contain it."""
    condition, values = chosen.condition()
    order = SORTS[chosen.sort]
    rows = reader.rows(
        f"SELECT before, after FROM (SELECT episode_id, lag(episode_id) OVER (ORDER BY {order}) AS before, "  # noqa: S608
        f"lead(episode_id) OVER (ORDER BY {order}) AS after FROM {source} WHERE {condition}) WHERE episode_id = ?",
        [*values, episode_id],
    )
    return rows[0] if rows else (None, None)


def _facets(reader: Reader, chosen: EpisodeFilter, source: str) -> tuple[CountedFacet, ...]:
    """Each facet is counted with the choices of all other facets. One query with UNION ALL: grouping by every facet in
    the same pass (GROUPING SETS) takes twice as long over text."""
    counts: dict[str, list[tuple[str, int]]] = {facet.name: [] for facet in FACETS}
    parts, values = [], []
    for facet in FACETS:
        condition, own = chosen.condition(but=facet.name)
        parts.append(
            f"SELECT '{facet.name}' AS facet, coalesce(nullif({facet.column}, ''), '{NOTHING}') AS value, "  # noqa: S608 - our own names
            f"count(*) AS n FROM {source} WHERE {condition} GROUP BY value"
        )
        values += own
    for name, value, count in reader.rows(f"{' UNION ALL '.join(parts)} ORDER BY n DESC, value", values):
        counts[name].append((value, count))
    return tuple(_counted(facet, counts[facet.name], chosen.chosen.get(facet.name, ())) for facet in FACETS)


def _counted(facet: Facet, counts: list[tuple[str, int]], chosen: tuple[str, ...]) -> CountedFacet:
    known = dict(counts)
    values = [FacetValue(value=value, count=known.get(value, 0), is_chosen=True) for value in chosen]
    values += [FacetValue(value=value, count=count, is_chosen=False) for value, count in counts if value not in chosen]
    return CountedFacet(facet=facet, values=tuple(values[: max(MAX_VALUES, len(chosen))]), num_values=len(values))


def _spans(reader: Reader, chosen: EpisodeFilter, source: str) -> tuple[CountedSpan, ...]:
    parts, values = [], []
    for span in SPANS:
        condition, own = chosen.condition(but=span.name)
        bars = _BARS.format(source=source, column=span.column, condition=condition, bars=NUM_BARS)
        parts.append(f"SELECT '{span.name}' AS span, * FROM ({bars})")  # noqa: S608 - our own names
        values += own
    found: dict[str, list[tuple[Any, ...]]] = {span.name: [] for span in SPANS}
    for name, *row in reader.rows(f"{' UNION ALL '.join(parts)} ORDER BY span, bar", values):
        found[name].append(tuple(row))
    return tuple(_counted_span(span, found[span.name]) for span in SPANS)


def _counted_span(span: Span, rows: list[tuple[Any, ...]]) -> CountedSpan:
    """`rows`: those of _BARS."""
    if not rows:
        return CountedSpan(span=span, bars=(), low=None, high=None)
    low, high = rows[0][0], rows[0][1]
    width = (high - low) / NUM_BARS
    bars = tuple(_bar(span, low + width * bar, low + width * (bar + 1), low, high, count) for _, _, bar, count in rows)
    return CountedSpan(span=span, bars=bars, low=low, high=high)


def _bar(span: Span, start: float, end: float, low: float, high: float, count: int) -> Bar:
    """The bounds for whole numbers are the first and last whole number in the bar."""
    if high == low:
        return Bar(low=low, high=high, count=count)
    if span.is_whole:
        first = -(-start // 1)
        last = high if end >= high else -(-end // 1) - 1
        return Bar(low=first, high=last, count=count)
    return Bar(low=round(start, 4), high=round(end, 4), count=count)
