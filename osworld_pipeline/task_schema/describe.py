"""docs/evaluators.md, written from the declarations: `python -m osworld_pipeline.task_schema.describe >
docs/evaluators.md`"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from osworld_pipeline.task_schema.getters import GETTERS
from osworld_pipeline.task_schema.metrics import METRICS
from osworld_pipeline.task_schema.osworld import OSWORLD_GETTERS, OSWORLD_METRICS, OSWORLD_VERBS
from osworld_pipeline.task_schema.spec import Key, Metric, State
from osworld_pipeline.task_schema.verbs import VERBS

HEAD = """# Verbs, getters and metrics of a task
A task prepares its desktop with set-up verbs. Its evaluator reads state with getters and compares it with metrics.
Names and scores are OSWorld's, except those of the `windows_` metrics ([Windows](windows.md)). This page lists all
verbs, getters and metrics; it is generated from the code (`python -m
osworld_pipeline.task_schema.describe > docs/evaluators.md`).

A task suite is checked against these lists when it is loaded, and an env server checks each task again before it
leases a desktop. An unknown verb, getter, metric, parameter, rule or option is refused with a message that gives
similar names, or all known ones. A rule that every desktop would satisfy is refused, too. Names that only OSWorld's
own desktop-env has
([below](#only-in-desktop-env)) load in a suite with a warning, and run on env servers with `--grader
osworld` or `--provider desktop_env`.

An evaluator is an object with `func`, `result`, and for most metrics `expected`; `options` if the metric has options.
Several metrics are lists of equal length (`func`, `result`, `expected`, `options`) joined by `conj`: `and` (the mean
of the scores, 0 if one is 0) or `or` (the maximum). `postconfig` is a list of set-up verbs that run before the
evaluator reads the desktop. The `func` `infeasible` marks a task that cannot be done; giving up (FAIL) is its success.
State that a getter does not find scores 0; a desktop or a grader that fails is a fault, and never a score."""
GIVES: Mapping[State, str] = {
    "text": "a text",
    "file": "a file",
    "size": "width and height",
    "tree": "a folder's contents",
    "rules": "rules",
    "anything": "a text, size or folder's contents",
}


def describe() -> str:
    """The whole page, in Markdown."""
    parts = [HEAD, "## Set-up verbs", *_index(VERBS)]
    for verb in VERBS.values():
        parts += [f"### {verb.name}", verb.about, *_table("parameter", verb.keys), _example(verb.example)]
    parts += ["## Getters", *_index(GETTERS)]
    for getter in GETTERS.values():
        about = f"{getter.about} Returns {GIVES[getter.gives]}."
        parts += [f"### {getter.name}", about, *_table("parameter", getter.keys), _example(getter.example)]
    parts += ["## Metrics", *_index(METRICS)]
    for metric in METRICS.values():
        parts += _metric(metric)
    parts += ["## Only in desktop-env", *_osworlds()]
    return "\n\n".join(parts) + "\n"


def _metric(metric: Metric) -> list[str]:
    reads = f"`result`: {GIVES[metric.result]}"
    reads += f"; `expected`: {GIVES[metric.expected]}." if metric.expected else "; no `expected`."
    parts = [f"### {metric.name}", f"{metric.about} {reads}", *_table("rule", metric.rules)]
    if metric.needs_a_rule:
        parts.append("At least one of the rules is required.")
    return [*parts, *_table("option", metric.options), _example(metric.example)]


def _index(words: Mapping[str, Any]) -> list[str]:
    return [", ".join(f"[`{name}`](#{name})" for name in words)]


def _table(what: str, keys: Sequence[Key]) -> list[str]:
    if not keys:
        return []
    rows = [f"| `{key.name}` | {key.kind}{'' if key.is_required else ', optional'} | {key.about} |" for key in keys]
    return ["\n".join([f"| {what} | type | meaning |", "|---|---|---|", *rows])]


def _example(value: Mapping[str, Any]) -> str:
    return f"```json\n{_laid_out(value)}\n```"


def _laid_out(value: Mapping[str, Any]) -> str:
    """One line if it fits, else one line per key."""
    line = json.dumps(value)
    if len(line) <= 110:
        return line
    return "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(inner)}" for key, inner in value.items()) + "\n}"


def _osworlds() -> list[str]:
    groups = (("Set-up verbs", OSWORLD_VERBS), ("Getters", OSWORLD_GETTERS), ("Metrics", OSWORLD_METRICS))
    return [f"{what}: {', '.join(f'`{name}`' for name in sorted(names))}." for what, names in groups]


if __name__ == "__main__":
    print(describe(), end="")
