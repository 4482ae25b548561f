"""The filter of a list of episodes: read from an address, written into one, and translated to SQL over `facts`. Every
state of the list has an address, so that it can be shared."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlencode

PAGE_SIZE = 50
MAX_TEXT = 2_000
MAX_CHOSEN = 50


@dataclass(frozen=True, kw_only=True)
class Facet:
    """A column with selectable values; several chosen ones are joined by OR."""

    name: str
    """Parameter of an address."""
    label: str
    column: str
    is_open: bool = True
    """Shown expanded."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """A column of which a range is chosen, both ends inclusive."""

    name: str
    label: str
    column: str
    is_whole: bool


FACETS = (
    Facet(name="outcome", label="Outcome", column="outcome"),
    Facet(name="purpose", label="Purpose", column="purpose"),
    Facet(name="stage", label="Stage", column="stage"),
    Facet(name="reading", label="Actions the parser read", column="reading"),
    Facet(name="checkpoint", label="Checkpoint", column="checkpoint_id", is_open=False),
    Facet(name="suite", label="Suite, as task ids name it", column="suite"),
    Facet(name="family", label="Family of tasks", column="family", is_open=False),
    Facet(name="domain", label="Domain", column="domain", is_open=False),
    Facet(name="task", label="Task", column="task_id", is_open=False),
    Facet(name="fault", label="Fault or timeout", column="fault", is_open=False),
    Facet(name="run", label="Training stage or evaluation", column="stage_key", is_open=False),
    Facet(name="provider", label="Desktop", column="provider", is_open=False),
)
SPANS = (
    Span(name="reward", label="Task reward", column="task_reward", is_whole=False),
    Span(name="shaped", label="Shaped reward", column="shaped_reward", is_whole=False),
    Span(name="turns", label="Turns", column="num_steps", is_whole=True),
    Span(name="update", label="Update", column='nullif("update", -1)', is_whole=True),
)
HIDDEN = {"group": "group_id", "mlflow": "mlflow_run", "dagster": "dagster_run"}
"""Columns that must equal one value, by parameter of an address; only links set them, and pages show them if set."""
SORTS = {
    "newest": "started_at DESC NULLS LAST, episode_id",
    "oldest": "started_at NULLS LAST, episode_id",
    "reward": "task_reward DESC NULLS LAST, shaped_reward DESC NULLS LAST, episode_id",
    "shaped": "shaped_reward DESC NULLS LAST, episode_id",
    "turns": "num_steps DESC NULLS LAST, episode_id",
    "longest": "total_s DESC NULLS LAST, episode_id",
    "task": "task_id, checkpoint_id, seed, episode_id",
}
TEXTS = ("q", "said", "where")
"""`q`: text in task, instruction, id or fault; `said`: text in the model's responses; `where`: a condition in SQL over
`episodes`."""
NOTHING = "none"
"""Value in an address for rows without a value."""


@dataclass(frozen=True, kw_only=True)
class EpisodeFilter:
    chosen: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Chosen values by facet."""
    spans: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)
    """Lowest and highest value of each span, None if open."""
    hidden: Mapping[str, str] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    sort: str = "newest"
    page: int = 1

    @classmethod
    def from_query(cls, pairs: Iterable[tuple[str, str]]) -> "EpisodeFilter":
        """The filter of an address; unknown parameters and invalid numbers are ignored."""
        given: dict[str, list[str]] = {}
        for name, value in pairs:
            given.setdefault(name, []).append(value[:MAX_TEXT])
        chosen = {
            facet.name: tuple(dict.fromkeys(given[facet.name]))[:MAX_CHOSEN] for facet in FACETS if facet.name in given
        }
        spans = {}
        for span in SPANS:
            ends = (_number(given, f"{span.name}_min"), _number(given, f"{span.name}_max"))
            if ends != (None, None):
                spans[span.name] = ends
        page = _number(given, "page")
        return cls(
            chosen=chosen,
            spans=spans,
            hidden={name: given[name][-1] for name in HIDDEN if given.get(name, [""])[-1]},
            texts={name: given[name][-1].strip() for name in TEXTS if given.get(name, [""])[-1].strip()},
            sort=next((name for name in given.get("sort", []) if name in SORTS), "newest"),
            page=int(min(max(page or 1, 1), 1_000_000)),
        )

    def query(self) -> str:
        """The address's query; empty for the first page of all episodes, the newest first."""
        return urlencode(self.pairs())

    def pairs(self) -> list[tuple[str, str]]:
        """Names and values of the address's query."""
        pairs: list[tuple[str, str]] = [(name, value) for name, value in self.texts.items()]
        pairs += [(name, value) for name, values in self.chosen.items() for value in values]
        for name, ends in self.spans.items():
            pairs += [
                (f"{name}_{end}", f"{value:g}")
                for end, value in zip(("min", "max"), ends, strict=True)
                if value is not None
            ]
        pairs += list(self.hidden.items())
        if self.sort != "newest":
            pairs.append(("sort", self.sort))
        if self.page > 1:
            pairs.append(("page", str(self.page)))
        return pairs

    def toggled(self, facet: str, value: str) -> "EpisodeFilter":
        """The filter with a value added or removed; on the first page."""
        had = self.chosen.get(facet, ())
        values = tuple(one for one in had if one != value) if value in had else (*had, value)
        chosen = {name: kept for name, kept in {**self.chosen, facet: values}.items() if kept}
        return replace(self, chosen=chosen, page=1)

    def with_span(self, name: str, low: float | None, high: float | None) -> "EpisodeFilter":
        spans = {**self.spans, name: (low, high)}
        return replace(self, spans={key: ends for key, ends in spans.items() if ends != (None, None)}, page=1)

    def without(self, name: str) -> "EpisodeFilter":
        """The filter without the choice, range or text of this name."""
        kept = [{key: value for key, value in group.items() if key != name}
                for group in (self.chosen, self.spans, self.hidden, self.texts)]  # fmt: skip
        return replace(self, chosen=kept[0], spans=kept[1], hidden=kept[2], texts=kept[3], page=1)

    def on_page(self, page: int) -> "EpisodeFilter":
        return replace(self, page=page)

    @property
    def is_narrowed(self) -> bool:
        return bool(self.chosen or self.spans or self.hidden or self.texts)

    def condition(self, *, but: str = "") -> tuple[str, list[Any]]:
        """The choices and ranges as SQL with the values of its question marks. `but`: without this facet or span, to
        count its other values."""
        terms: list[str] = []
        values: list[Any] = []
        for facet in FACETS:
            chosen = self.chosen.get(facet.name, ())
            if chosen and facet.name != but:
                named = [value for value in chosen if value != NOTHING]
                either = [f"{facet.column} IN ({', '.join('?' * len(named))})"] if named else []
                either += [f"coalesce({facet.column}, '') = ''"] if NOTHING in chosen else []
                terms.append(f"({' OR '.join(either)})")
                values += named
        for span in SPANS:
            ends = self.spans.get(span.name, (None, None)) if span.name != but else (None, None)
            for value, sign in zip(ends, (">=", "<="), strict=True):
                if value is not None:
                    terms.append(f"{span.column} {sign} ?")
                    values.append(value)
        for name, value in self.hidden.items():
            terms.append(f"{HIDDEN[name]} = ?")
            values.append(value)
        return " AND ".join(terms) or "true", values

    def words(self) -> tuple[str, list[Any]]:
        """The search in task, instruction, id and fault, as SQL with values."""
        text = self.texts.get("q", "").lower()
        if not text:
            return "true", []
        columns = ("task_id", "instruction", "episode_id", "error")
        return "(" + " OR ".join(f"contains(lower({name}), ?)" for name in columns) + ")", [text] * len(columns)


def _number(given: Mapping[str, Sequence[str]], name: str) -> float | None:
    try:
        value = float(given.get(name, [""])[-1])
    except ValueError:
        return None
    return value if math.isfinite(value) else None
