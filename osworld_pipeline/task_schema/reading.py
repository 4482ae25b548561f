"""Reads the set-up and the evaluator of a task, and refuses by name what cannot be executed or scored here."""

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import TaskError
from osworld_pipeline.task_schema.getters import GETTERS
from osworld_pipeline.task_schema.metrics import METRICS
from osworld_pipeline.task_schema.osworld import OSWORLD_GETTERS, OSWORLD_METRICS, OSWORLD_VERBS
from osworld_pipeline.task_schema.spec import Key, Metric, State
from osworld_pipeline.task_schema.verbs import VERBS

INFEASIBLE = "infeasible"
EVALUATOR_KEYS = ("func", "result", "expected", "options", "conj", "postconfig")


@dataclass(frozen=True, kw_only=True)
class Check:
    """One metric with its getters' configs."""

    func: str
    result: Mapping[str, Any] | None
    expected: Mapping[str, Any] | None
    options: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Grader:
    """A task's evaluator, read and checked once, before a desktop is leased for it."""

    checks: tuple[Check, ...]
    """Empty for an infeasible task."""
    conj: str
    is_list: bool

    @property
    def is_infeasible(self) -> bool:
        return not self.checks


def check_verbs(task_id: str, verbs: object) -> tuple[Mapping[str, Any], ...]:
    """The verbs of a task, after checking that they and their parameters exist.

    Raises:
        TaskError: a malformed list, an unknown verb, or a wrong parameter.
    """
    return _Reader(task_id).verbs(verbs)


def read_grader(task_id: str, evaluator: Mapping[str, Any]) -> Grader:
    """
    Raises:
        TaskError: lists of different lengths, an unknown metric or getter, or parameters, rules or options that these
            do not have, or that are empty.
    """
    return _Reader(task_id).grader(evaluator)


def check_task(task: Task) -> tuple[str, ...]:
    """Checks a task for any env server; returns the names that only OSWorld's desktop-env has, which are accepted.

    Raises:
        TaskError: what neither desktop-env nor our own graders can execute or score.
    """
    reader = _Reader(task.task_id, lets_osworlds_pass=True)
    reader.verbs(task.config.get("config"))
    reader.verbs(task.config["evaluator"].get("postconfig"))
    reader.grader(task.config["evaluator"])
    return tuple(dict.fromkeys(reader.osworlds))


def suggestion(name: object, known: Collection[str], others: Collection[str] = ()) -> str:
    """The names in `known` and `others` that are similar to a wrong one; if there is none, all known ones."""
    near = difflib.get_close_matches(str(name), sorted({*known, *others}), n=3)
    return f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(sorted(known))}"


class _Reader:
    """Reads one task; `osworlds` collects the accepted names that only OSWorld has."""

    def __init__(self, task_id: str, *, lets_osworlds_pass: bool = False) -> None:
        self.task = f"task {task_id}"
        self.lets_osworlds_pass = lets_osworlds_pass
        self.osworlds: list[str] = []

    def verbs(self, verbs: object) -> tuple[Mapping[str, Any], ...]:
        if verbs is None:
            return ()
        if not isinstance(verbs, Sequence) or isinstance(verbs, str | bytes):
            raise TaskError(f"{self.task} has a config that is not a list")
        for index, verb in enumerate(verbs, start=1):
            if not isinstance(verb, Mapping) or not isinstance(verb.get("type"), str):
                raise TaskError(f"{self.task}: set-up verb {index} is not an object with a 'type'")
            parameters = verb.get("parameters", {})
            if not isinstance(parameters, Mapping):
                raise TaskError(f"{self.task}: the parameters of set-up verb {index} are not an object")
            if self._is_ours("set-up verb", verb["type"], VERBS, OSWORLD_VERBS):
                self._check_keys(
                    f"set-up verb {index} ({verb['type']})", "parameter", VERBS[verb["type"]].keys, parameters
                )
        return tuple(verbs)

    def grader(self, evaluator: Mapping[str, Any]) -> Grader:
        for key in evaluator:
            if key not in EVALUATOR_KEYS:
                raise TaskError(f"{self.task} has an evaluator with {key!r}: {suggestion(key, EVALUATOR_KEYS)}")
        func = evaluator["func"]
        if func in (INFEASIBLE, [INFEASIBLE]):
            return Grader(checks=(), conj="and", is_list=False)
        is_list = isinstance(func, list)
        funcs = func if is_list else [func]
        columns = [self._column(evaluator, key, is_list, len(funcs)) for key in ("result", "expected", "options")]
        checks = tuple(
            Check(func=name, result=result, expected=expected, options=options or {})
            for name, result, expected, options in zip(funcs, *columns, strict=True)
        )
        for check in checks:
            self._check(check)
        conj = evaluator.get("conj", "and")
        if conj not in ("and", "or"):
            raise TaskError(f"{self.task} joins its metrics by {conj!r}; OSWorld supports and, or")
        return Grader(checks=checks, conj=conj, is_list=is_list)

    def _column(
        self, evaluator: Mapping[str, Any], key: str, is_list: bool, num_checks: int
    ) -> list[Mapping[str, Any] | None]:
        """One of the parallel lists; an absent or empty one means None for every item."""
        value = evaluator.get(key)
        values: list[Any]
        values = [None] * num_checks if not value else value if isinstance(value, list) and is_list else [value]
        if len(values) != num_checks:
            raise TaskError(f"{self.task} has {num_checks} evaluator functions and {len(values)} of {key!r}")
        if not all(item is None or isinstance(item, Mapping) for item in values):
            raise TaskError(f"{self.task} has an evaluator whose {key!r} is not an object")
        return [item or None for item in values]

    def _check(self, check: Check) -> None:
        metric = METRICS[check.func] if self._is_ours("metric", check.func, METRICS, OSWORLD_METRICS) else None
        for side, config in (("result", check.result), ("expected", check.expected)):
            if config is not None:
                self._check_getter(config)
            if metric is not None:
                self._check_side(metric, side, metric.result if side == "result" else metric.expected, config)
        if metric is not None:
            self._check_keys(metric.name, "option", metric.options, check.options)

    def _check_getter(self, config: Mapping[str, Any]) -> None:
        if self._is_ours("getter", config.get("type"), GETTERS, OSWORLD_GETTERS):
            given = {key: value for key, value in config.items() if key != "type"}
            self._check_keys(f"the getter {config['type']}", "parameter", GETTERS[config["type"]].keys, given)

    def _check_side(self, metric: Metric, side: str, reads: State | None, config: Mapping[str, Any] | None) -> None:
        if reads is None:
            if config is not None:
                raise TaskError(f"{self.task}: {metric.name} has no {side!r}; remove it")
            return
        if config is None:
            raise TaskError(f"{self.task}: {metric.name} needs {side!r}: a getter that returns {_NOUNS[reads]}")
        getter = GETTERS.get(config["type"])
        if getter is None:
            return  # a getter of OSWorld's own, whose type is unknown here
        if not _fits(getter.gives, reads):
            able = [one.name for one in GETTERS.values() if _fits(one.gives, reads)]
            raise TaskError(
                f"{self.task}: {metric.name} reads {_NOUNS[reads]} as {side!r}, and the getter {getter.name} returns "
                f"{_NOUNS[getter.gives]}; use {' or '.join(able)}"
            )
        if reads == "rules":
            self._check_rules(metric, config["rules"])

    def _check_rules(self, metric: Metric, rules: object) -> None:
        if not isinstance(rules, Mapping):
            raise TaskError(f"{self.task}: the rules of {metric.name} are not an object")
        self._check_keys(metric.name, "rule", metric.rules, rules)
        if metric.needs_a_rule and not any(rules.values()):
            names = " and ".join(repr(key.name) for key in metric.rules)
            raise TaskError(f"{self.task}: {metric.name} has no rule, so every desktop would fulfil it; set {names}")

    def _check_keys(self, where: str, what: str, keys: Sequence[Key], given: Mapping[str, Any]) -> None:
        names = {key.name: key for key in keys}
        for name, value in given.items():
            if name not in names:
                listed = f"its {what}s are {', '.join(names)}" if names else f"it has no {what}s"
                raise TaskError(f"{self.task}: {where} has no {what} {name!r}; {listed}")
            if (fault := names[name].fault_of(value)) is not None:
                raise TaskError(f"{self.task}: the {what} {name!r} of {where} {fault}")
        for key in keys:
            if key.is_required and key.name not in given:
                raise TaskError(f"{self.task}: {where} needs the {what} {key.name!r} ({key.about})")

    def _is_ours(self, what: str, name: object, ours: Mapping[str, Any], osworlds: Collection[str]) -> bool:
        """False for an accepted name that only OSWorld has."""
        if isinstance(name, str) and name in ours:
            return True
        if isinstance(name, str) and name in osworlds:
            if not self.lets_osworlds_pass:
                raise TaskError(
                    f"{self.task} needs the {what} {name!r}, which only OSWorld's desktop-env has; "
                    f"serve it with {_OSWORLDS_WAY[what]}"
                )
            self.osworlds.append(f"{what} {name}")
            return False
        others = osworlds if self.lets_osworlds_pass else ()
        raise TaskError(
            f"{self.task} needs the {what} {name!r}, which does not exist: {suggestion(name, ours, others)}"
        )


_NOUNS: Mapping[str, str] = {
    "text": "a text",
    "file": "a file",
    "size": "a size",
    "tree": "a folder's contents",
    "rules": "rules",
    "anything": "a value",
}
_OSWORLDS_WAY: Mapping[str, str] = {
    "set-up verb": "--provider desktop_env",
    "getter": "--grader osworld or --provider desktop_env",
    "metric": "--grader osworld or --provider desktop_env",
}


def _fits(gives: State, reads: State) -> bool:
    """Whether a metric can use a getter's output. A file is not valid as `anything`: its bytes equal no value."""
    return gives == reads or (reads == "anything" and gives != "file")
