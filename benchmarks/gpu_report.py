"""The GPU measurement as a page of Markdown for docs/."""

from collections.abc import Iterable, Sequence
from datetime import date

from benchmarks.gpu_sheet import PartResult

TITLES = {
    "exactness": "Exactness: all weights",
    "lora": "Exactness: adapters, sampled from unmerged",
    "packing": "Packing against padding",
    "speed": "Speed and memory: all weights",
    "speed_lora": "Speed and memory: adapters",
    "context": "Longest context: all weights",
    "context_lora": "Longest context: adapters",
    "sglang": "An sglang server",
}


def markdown(results: Sequence[PartResult], *, size: str, versions: str, seconds: float, day: date) -> str:
    devices = sorted({result.device for result in results if result.device}) or ["unknown device"]
    num_ok = sum(result.is_ok for result in results)
    lines = [
        f"# Measured on {', '.join(devices)}",
        "",
        f"{day.isoformat()}, size `{size}`, {seconds:.0f} s, {versions}. {num_ok} of {len(results)} parts are ok.",
        "",
        "| part | status | seconds |",
        "|---|---|---|",
        *(f"| {TITLES.get(one.name, one.name)} | {_status(one)} | {one.seconds:.0f} |" for one in results),
    ]
    for result in results:
        lines += ["", f"## {TITLES.get(result.name, result.name)}", *_part(result)]
    return "\n".join(lines) + "\n"


def _status(result: PartResult) -> str:
    if result.status == "ok" and not result.is_ok:
        return "a check failed"
    return result.status


def _part(result: PartResult) -> Iterable[str]:
    if result.error:
        yield ""
        yield f"{result.status.capitalize()}: {_cell(result.error)}"
    elif result.status == "timed out":
        yield ""
        yield "Timed out; its figures so far are below."
    if result.figures:
        yield from ("", "| figure | value |", "|---|---|")
        yield from (f"| {_cell(figure.name)} | {_cell(figure.value)} |" for figure in result.figures)
    if result.claims:
        yield ""
        yield from (f"- {'met' if claim.is_met else '**not met**'}: {claim.sentence}" for claim in result.claims)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
