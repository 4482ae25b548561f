"""`python -m benchmarks.bench_settling`: how often the guest's verdict that a screen has settled is wrong, and the time
that it saves, on real local desktops: with a program that answers 50 to 400 ms late, and with the desktop's programs.

Every action is followed by the adaptive pause and a screenshot, then by the rest of the fixed pause and another. The
verdict is wrong if it came early and the two screenshots differ."""

import argparse
import asyncio
import io
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from rich.console import Console

from benchmarks.spread import print_table, show_machine, verdict
from env_server.guest.stillness import MAX_STILL_CELLS, num_changed_cells
from env_server.guest_client import GuestCall, GuestClient
from env_server.providers.local.provider import LocalProvider
from osworld_pipeline.errors import PipelineError

MAX_WRONG_SHARE = 0.005
SLOW_WINDOW = Path(__file__).with_name("slow_window.py")
SHORTEST_S, LONGEST_S = 0.05, 0.4
"""Range of the delays of its answers."""
STRIP = 24
"""Height in pixels of the strip at its bottom, which does not react."""
SLOW = {"late": "l", "echo": "e", "stages": "s", "busy": "b", "mark": "m", "nothing": "n", "click": ""}
"""The key that requests each kind of answer of the slow window; `click` is a mouse click and has no key."""
SILENT = {"silent": "f"}
"""A large part at once, then the whole answer after a pause without computing: before the end of the pause, the screen
cannot be distinguished from a complete answer. It is reported separately."""
LINE = ("write", "ls -la /usr/share/doc | head -40\n")
PROGRAMS: dict[str, Sequence[tuple[str, ...]]] = {
    "xterm": (LINE, ("write", "clear\n"), ("write", "seq 2000\n"), ("write", "date; python3 -c 'print(1)'\n")),
    "mousepad": (
        ("hotkey", "ctrl", "f"), ("press", "escape"), ("hotkey", "ctrl", "h"), ("press", "escape"),
        ("hotkey", "ctrl", "o"), ("press", "escape"), ("hotkey", "alt", "f"), ("press", "escape"),
        ("hotkey", "ctrl", "end"), ("hotkey", "ctrl", "home"), ("write", "A sentence of some words.\n"),
    ),
    "pcmanfm": (("hotkey", "alt", "up"), ("press", "f5"), ("hotkey", "alt", "left"), ("hotkey", "ctrl", "a")),
}  # fmt: skip
"""Actions in the desktop's own programs, in turn."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    kind: str
    step_s: float
    """Action, adaptive pause and screenshot."""
    fixed_s: float
    """The same with the fixed pause."""
    is_wrong: bool


async def try_action(
    guest: GuestClient, kind: str, call: GuestCall, *, pause_s: float, differ: Callable[[bytes, bytes], bool]
) -> Trial:
    start = time.perf_counter()
    await guest.act([call], settle_s=pause_s)
    acted_s = time.perf_counter() - start
    early = await guest.screenshot()
    step_s = time.perf_counter() - start
    await asyncio.sleep(pause_s - step_s)
    is_early = acted_s < pause_s
    is_wrong = is_early and differ(early, await guest.screenshot())
    await asyncio.sleep(LONGEST_S)  # a late answer must not count as an effect of the next action
    return Trial(kind=kind, step_s=step_s, fixed_s=max(acted_s, pause_s) + step_s - acted_s, is_wrong=is_wrong)


def differ_above_strip(first: bytes, second: bytes) -> bool:
    """Any pixel except the slow window's caret and clock."""
    images = [Image.open(io.BytesIO(data)).convert("RGB") for data in (first, second)]
    width, height = images[0].size
    above = [image.crop((0, 0, width, height - STRIP)).tobytes() for image in images]
    return above[0] != above[1]


def differ_in_more_than_a_caret(first: bytes, second: bytes) -> bool:
    images = [Image.open(io.BytesIO(data)).convert("RGBX") for data in (first, second)]
    before, after = (image.tobytes() for image in images)
    return num_changed_cells(before, after, width=images[0].width) > MAX_STILL_CELLS


async def start_slow_window(guest: GuestClient, *, seed: int, delays_s: tuple[float, float]) -> None:
    path = "/tmp/slow_window.py"
    await guest.upload(path, SLOW_WINDOW.read_bytes())
    await guest.launch(["python3", path, str(seed), *map(str, delays_s), str(STRIP)])
    await asyncio.sleep(2.0)


async def drive_slow_window(
    guest: GuestClient, seed: int, count: int, pause_s: float, size: tuple[int, int]
) -> list[Trial]:
    await start_slow_window(guest, seed=seed, delays_s=(SHORTEST_S, LONGEST_S))
    chance = random.Random(seed)
    trials = []
    for _ in range(count):
        kind, key = chance.choice([*SLOW.items(), *SILENT.items()])
        place = (chance.randrange(size[0]), chance.randrange(size[1] - STRIP - 24))
        call = GuestCall(name="press", args=(key,)) if key else GuestCall(name="click", args=place)
        trials.append(await try_action(guest, kind, call, pause_s=pause_s, differ=differ_above_strip))
    return trials


async def drive_programs(guest: GuestClient, count: int, pause_s: float) -> list[Trial]:
    for command in (["xterm"], ["mousepad", "/usr/share/common-licenses/GPL-3"], ["pcmanfm", "/usr/share/doc"]):
        await guest.launch(command)
        await guest.activate_window(command[0], by_class=True)
    await asyncio.sleep(3.0)
    trials = []
    actions = [(program, call) for program, calls in PROGRAMS.items() for call in calls]
    for number in range(count):
        program, (name, *arguments) = actions[number % len(actions)]
        if number % len(actions) == 0 or actions[number % len(actions) - 1][0] != program:
            await guest.activate_window(program, by_class=True)
            await asyncio.sleep(1.0)
        call = GuestCall(name=name, args=tuple(arguments))
        trials.append(await try_action(guest, program, call, pause_s=pause_s, differ=differ_in_more_than_a_caret))
    return trials


async def measure(arguments: argparse.Namespace) -> list[Trial]:
    """The actions are spread over the desktops; a quarter of them use the desktop's own programs."""
    provider = LocalProvider(images=arguments.state_dir, screen_size=arguments.screen)
    share = arguments.actions // arguments.desktops

    async def use(seed: int) -> list[Trial]:
        desktop = await provider.start(f"bench-{seed}")
        trials = await drive_programs(desktop.guest, share // 4, arguments.pause)
        await desktop.reset()
        rest = share - share // 4
        return trials + await drive_slow_window(desktop.guest, seed, rest, arguments.pause, arguments.screen)

    try:
        shares: list[Awaitable[list[Trial]]] = [use(seed) for seed in range(arguments.desktops)]
        return [trial for trials in await asyncio.gather(*shares) for trial in trials]
    finally:
        await provider.close()


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    console = Console(width=max(140, Console().width))
    about = show_machine(console)
    try:
        trials = asyncio.run(measure(arguments))
    except PipelineError as error:
        print(f"bench-settling: {error}", file=sys.stderr)
        return 1
    groups = {kind: (kind,) for kind in (*PROGRAMS, *SLOW, *SILENT)}
    groups |= {"all but silent": (*PROGRAMS, *SLOW), "all": tuple(groups)}
    results = [_result(name, [trial for trial in trials if trial.kind in kinds]) for name, kinds in groups.items()]
    rows = [
        (r["kind"], str(r["num_actions"]), f"{r['num_wrong']}", f"{r['wrong_share']:.1%}",
         f"{r['step_s']:.3f}", f"{r['fixed_s']:.3f}", f"{r['fixed_s'] / r['step_s']:.2f}")
        for r in results if r["num_actions"]
    ]  # fmt: skip
    is_right = results[-2]["wrong_share"] < MAX_WRONG_SHARE
    title = f"pause {arguments.pause:g} s; below {MAX_WRONG_SHARE:.1%} wrong, all but silent: {verdict(is_right)}"
    header = ("answer", "actions", "wrong", "share", "step, adaptive (s)", "step, fixed (s)", "ratio")
    print_table(console, title, header, rows)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": about, "pause_s": arguments.pause, "results": results}))
    return 0


def _result(name: str, trials: Sequence[Trial]) -> dict:
    count, num_wrong = max(1, len(trials)), sum(trial.is_wrong for trial in trials)
    return {
        "kind": name,
        "num_actions": len(trials),
        "num_wrong": num_wrong,
        "wrong_share": num_wrong / count,
        "step_s": sum(trial.step_s for trial in trials) / count,
        "fixed_s": sum(trial.fixed_s for trial in trials) / count,
    }


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench-settling", description=__doc__)
    parser.add_argument("--actions", type=int, default=500)
    parser.add_argument("--pause", type=float, default=0.3, metavar="S", help="as desktop.pause_s (default 0.3)")
    parser.add_argument(
        "--screen", type=_size, default=(512, 320), metavar="WxH", help="of a desktop (default 512x320)"
    )
    parser.add_argument("--desktops", type=int, default=2, help="at once (default 2)")
    parser.add_argument("--state-dir", type=Path, default=Path("var/desktops"), help="folder of the local image")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE")
    return parser.parse_args(argv)


def _size(text: str) -> tuple[int, int]:
    width, height = text.split("x")
    return int(width), int(height)


if __name__ == "__main__":
    sys.exit(main())
