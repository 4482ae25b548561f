"""`python -m benchmarks.bench_learning [demo|dense|sparse|all]`: does it learn? The pipeline on real desktops over
several seeds: held-out success of SFT and of both GSPO phases, paired, with a picture; and what replay adds.

`demo` runs the recipe of `make demo` and evaluates each seed separately, as its user does. `dense` runs the
recipe `learning`; `sparse` runs `learning_sparse`, whose SFT sees few tasks, in three arms: replay of the other
demonstrations, SFT on these too instead, and neither; `all` runs these two. A stopped run resumes.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.learning_picture import RewardCurve, draw_learning
from benchmarks.processes import BenchmarkError
from benchmarks.spread import Spread, print_table, show_machine, verdict
from osworld_pipeline.domain.checkpoint import Checkpoint, Stage
from osworld_pipeline.domain.digest import digest_json
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import PipelineError
from osworld_pipeline.evaluation.comparison import Comparison, compare_paired
from osworld_pipeline.evaluation.effect import Effect, SeedSpread, judge_effect
from osworld_pipeline.evaluation.scores import rates_by_seed, read_evals
from osworld_pipeline.recipes import Recipe, load_recipe
from osworld_pipeline.runs.checkpoints.ids import stage_recipe_digest
from osworld_pipeline.runs.evaluate.plan import plan_evaluation
from osworld_pipeline.tables.checkpoints import read_checkpoints
from osworld_pipeline.tables.query import run_query

STAGES = (Stage.SFT, Stage.GSPO_PHASE1, Stage.GSPO_PHASE2)
RUN_TIMEOUT_S = 2 * 3600
MAX_SEED_MINUTES = 45
MIN_GAIN = 0.15
SFT_RANGE = (0.10, 0.60)
TIMINGS = "timings.json"
REPOSITORY = Path(__file__).parents[1]

Rewards = Mapping[str, list[float]]
"""1 or 0 for each valid sample, by task and seed of the run."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One training configuration, over all seeds."""

    name: str
    recipe: str
    settings: tuple[str, ...] = ()
    """Differences from the recipe, as for `--set`."""


DEMO = Arm(name="demo", recipe="demo")
DENSE = Arm(name="gspo with replay", recipe="learning")
SPARSE = Arm(name="replay", recipe="learning_sparse")
SPARSE_ALONE = Arm(name="no replay", recipe="learning_sparse", settings=("replay.max_injections=0",))
SPARSE_SFT = Arm(
    name="all demonstrations in SFT",
    recipe="learning_sparse",
    settings=("replay.max_injections=0", "sft.task_share=1.0"),
)
"""Uses in SFT the demonstrations that SPARSE may use in replay: the arms differ only in this."""
GREEDY = ("evaluation.temperature=0.0", "evaluation.seeds=[0]")
SEEDED = ("model.seed", "sft.seed", "gspo.phase1.seed", "gspo.phase2.seed")
NUM_SEEDS, NUM_DEMO_SEEDS = 3, 10
MAX_DEMO_MINUTES = 10
MIN_SHARE_SHOWN = 0.9
"""Share of the demo's seeds that must gain MIN_GAIN with an interval above 0."""


@dataclass(frozen=True, kw_only=True)
class SeedRun:
    """Results of one arm with one seed."""

    arm: Arm
    seed: int
    minutes: float
    """Time from the start to the sampled evaluation; stages shared with an earlier arm in the same folder do not
    count."""
    sampled: Mapping[Stage, Rewards]
    greedy: Mapping[Stage, Rewards]
    """Empty for the demo, which has no greedy evaluation."""
    num_faults: int
    num_injections: int
    """Groups of both GSPO phases that a demonstration joined."""
    spreads: Mapping[Stage, SeedSpread | None]
    """Spread of the sampled evaluations between their seeds."""
    curve: RewardCurve


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    console = Console(width=max(150, Console().width))
    about = show_machine(console)
    results: dict[str, Any] = {"machine": about, "date": time.strftime("%Y-%m-%d")}
    try:
        if arguments.bench == "demo":
            results["demo"] = _demo(console, arguments)
        if arguments.bench in ("dense", "all"):
            results["dense"] = _dense(console, arguments)
        if arguments.bench in ("sparse", "all"):
            results["sparse"] = _sparse(console, arguments)
    except (BenchmarkError, PipelineError) as error:
        print(f"bench-learning: {error}", file=sys.stderr)
        return 1
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def _demo(console: Console, arguments: argparse.Namespace) -> dict[str, Any]:
    runs: list[SeedRun] = []
    gains: list[Comparison] = []
    for seed in arguments.seeds or range(NUM_DEMO_SEEDS):
        run = run_seed(DEMO, seed, arguments.folder, console)
        gain = compare_paired(run.sampled[Stage.SFT], run.sampled[Stage.GSPO_PHASE2])
        console.print(f"seed {seed}: {_points(gain)}, {run.minutes:.1f} minutes")
        runs.append(run)
        gains.append(gain)
    rows = [
        (
            str(run.seed), f"{run.minutes:.1f}", *(f"{_rate(run.sampled[stage]):.1%}" for stage in STAGES),
            f"{100 * gain.difference:+.1f}", f"{100 * gain.low:+.1f} to {100 * gain.high:+.1f}",
            "better" if gain.is_better else "no significant difference",
            str(run.num_injections), str(run.num_faults),
        )
        for run, gain in zip(runs, gains, strict=True)
    ]  # fmt: skip
    columns = ("seed", "minutes", *map(str, STAGES), "points", "95%", "phase 2 against SFT", "replay joined", "faults")
    print_table(console, "The demo, seed by seed", columns, rows)
    num_shown = sum(gain.difference >= MIN_GAIN and gain.is_better for gain in gains)
    num_silent = sum(not gain.is_better for gain in gains)
    console.print(
        f"seeds that gain {MIN_GAIN:.0%} or more with an interval above 0: {num_shown} of {len(gains)}; "
        f"bar {MIN_SHARE_SHOWN:.0%}: {verdict(num_shown >= MIN_SHARE_SHOWN * len(gains))}"
    )
    console.print(f"seeds without a significant gain: {num_silent} of {len(gains)}")
    minutes = Spread.of(run.minutes for run in runs)
    console.print(
        f"minutes a seed: {minutes.range_text()}; bar {MAX_DEMO_MINUTES}: "
        f"{verdict(minutes.values[-1] <= MAX_DEMO_MINUTES)}"
    )
    draw_learning(
        arguments.picture, {DEMO.name: [run.curve for run in runs]}, title="The demo: success while it trains"
    )
    console.print(f"picture: {arguments.picture}")
    return {
        "gains": [[gain.difference, gain.low, gain.high] for gain in gains],
        **_figures(runs),
    }


def _dense(console: Console, arguments: argparse.Namespace) -> dict[str, Any]:
    runs = [run_seed(DENSE, seed, arguments.folder, console) for seed in arguments.seeds or range(NUM_SEEDS)]
    effect = judge_runs(runs, runs, Stage.SFT, Stage.GSPO_PHASE2)
    compared = effect.comparison
    print_runs(console, "Held-out success, SFT and GSPO", runs)
    sft = compared.before
    minutes = Spread.of(run.minutes for run in runs)
    is_met = compared.difference >= MIN_GAIN and compared.is_better
    console.print(
        f"phase 2 above SFT, temperature 0.6: {_points(compared)}; {effect.words}; "
        f"bar +{MIN_GAIN:.0%} and an interval above 0: {verdict(is_met)}"
    )
    console.print(f"SFT at {sft:.1%}; bar 10% to 60%: {verdict(SFT_RANGE[0] <= sft <= SFT_RANGE[1])}")
    console.print(
        f"minutes a seed: {minutes.range_text()}; bar {MAX_SEED_MINUTES}: "
        f"{verdict(minutes.values[-1] <= MAX_SEED_MINUTES)}"
    )
    picture = arguments.picture
    draw_learning(picture, {DENSE.name: [run.curve for run in runs]}, title="Success while GSPO trains")
    console.print(f"picture: {picture}")
    return {
        "sft": sft,
        "verdict": effect.words,
        "gain": compared.difference,
        "low": compared.low,
        "high": compared.high,
        **_figures(runs),
    }


def _sparse(console: Console, arguments: argparse.Namespace) -> dict[str, Any]:
    compared = (SPARSE, SPARSE_SFT, SPARSE_ALONE)
    arms: dict[str, list[SeedRun]] = {arm.name: [] for arm in compared}
    for seed in arguments.seeds or range(NUM_SEEDS):
        for arm in compared:
            arms[arm.name].append(run_seed(arm, seed, arguments.folder, console))
    for name, runs in arms.items():
        print_runs(console, f"Sparse split, {name}", runs)
    results: dict[str, Any] = {name: _figures(runs) for name, runs in arms.items()}
    for other in (SPARSE_SFT, SPARSE_ALONE):
        effect = judge_runs(arms[other.name], arms[SPARSE.name], Stage.GSPO_PHASE2, Stage.GSPO_PHASE2)
        gain = effect.comparison
        console.print(f"{SPARSE.name} against {other.name}, after phase 2: {_points(gain)}; {effect.words}")
        results[f"against {other.name}"] = {
            "verdict": effect.words, "gain": gain.difference, "low": gain.low, "high": gain.high,
        }  # fmt: skip
    picture = arguments.picture.with_stem(f"{arguments.picture.stem}-sparse")
    curves = {name: [run.curve for run in runs] for name, runs in arms.items()}
    draw_learning(picture, curves, title="Success on a sparse split")
    console.print(f"picture: {picture}")
    return results


def run_seed(arm: Arm, seed: int, folder: Path, console: Console) -> SeedRun:
    """Run the pipeline twice over one state: with the recipe's evaluation, then with an additional greedy one. The demo
    runs once, with different tasks for each seed."""
    state = StateDir((folder / f"{arm.recipe}-{seed}" / "state").resolve())
    state.root.mkdir(parents=True, exist_ok=True)
    keys = SEEDED if arm is not DEMO else (*SEEDED, "suite.seed")
    seeded = (*arm.settings, *(f"{key}={seed}" for key in keys))
    sampled = load_recipe(arm.recipe, settings=seeded)
    greedy = load_recipe(arm.recipe, settings=(*seeded, *GREEDY))
    slug = arm.name.replace(" ", "_")
    minutes = _timed_demo(state, slug, arm.recipe, seeded, console)
    if arm is not DEMO:
        _timed_demo(state, f"{slug}_greedy", arm.recipe, (*seeded, *GREEDY), console)
    checkpoints = _checkpoints(state, sampled)
    rewards, num_faults = _rewards(state, sampled, checkpoints, seed)
    return SeedRun(
        arm=arm,
        seed=seed,
        minutes=minutes,
        sampled=rewards,
        greedy=_rewards(state, greedy, checkpoints, seed)[0] if arm is not DEMO else {},
        num_faults=num_faults,
        num_injections=_num_injections(state, checkpoints),
        spreads=_spreads(state, sampled, checkpoints),
        curve=_curve(state, checkpoints, rewards, seed),
    )


def _timed_demo(state: StateDir, name: str, recipe: str, settings: Sequence[str], console: Console) -> float:
    """Run the demo, unless it has finished before; returns its minutes, summed over interrupted runs."""
    timings_path = state.root / TIMINGS
    timings: dict[str, Any] = json.loads(timings_path.read_text()) if timings_path.is_file() else {}
    asked = digest_json(load_recipe(recipe, settings=settings).model_dump(mode="json"))
    if timings.get(f"{name} finished") == asked:
        return timings[name]
    # A separate Dagster instance: another demo in the same instance would treat this run as dead.
    shutil.copyfile(REPOSITORY / "dagster.yaml", state.root.parent / "dagster.yaml")
    command = [str(Path(sys.executable).parent / "osworld-pipeline"), "demo", "--recipe", recipe, "--state", "state"]
    command += [word for setting in settings for word in ("--set", setting)]
    console.print(f"{time.strftime('%H:%M')} {state.root.parent.name}: {name}", highlight=False)
    started = time.monotonic()
    log_path = state.root.parent / f"{name}.log"
    with log_path.open("ab") as log:
        ended = subprocess.run(
            command, cwd=state.root.parent, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            timeout=RUN_TIMEOUT_S, check=False,
        )  # fmt: skip
    timings[name] = timings.get(name, 0.0) + (time.monotonic() - started) / 60
    if ended.returncode == 0:
        timings[f"{name} finished"] = asked
    timings_path.write_text(json.dumps(timings))
    if ended.returncode:
        raise BenchmarkError(f"{name} ended with status {ended.returncode}: see {log_path}")
    return timings[name]


def _checkpoints(state: StateDir, recipe: Recipe) -> dict[Stage, Checkpoint]:
    """The checkpoints of the three stages of this recipe. All three are compared, because two arms in the same state
    can have the same settings in the last stage and differ in an earlier one."""
    made = {checkpoint.checkpoint_id: checkpoint for checkpoint in read_checkpoints(state)}
    chains = [_chain(last, made) for last in made.values() if last.stage is Stage.GSPO_PHASE2]
    wanted = {stage: stage_recipe_digest(stage, recipe) for stage in STAGES}
    found = [
        chain
        for chain in chains
        if all(stage in chain and chain[stage].recipe_digest == digest for stage, digest in wanted.items())
    ]
    if len(found) != 1:
        raise BenchmarkError(f"{state.root} has {len(found)} phase 2 checkpoints of this recipe, not one: remove it")
    return found[0]


def _chain(last: Checkpoint, made: Mapping[str, Checkpoint]) -> dict[Stage, Checkpoint]:
    """A checkpoint and its parents."""
    found: dict[Stage, Checkpoint] = {}
    current: Checkpoint | None = last
    while current is not None:
        found[current.stage] = current
        current = made.get(current.parent_id or "")
    return found


def _rewards(
    state: StateDir, recipe: Recipe, checkpoints: Mapping[Stage, Checkpoint], seed: int
) -> tuple[dict[Stage, Rewards], int]:
    found: dict[Stage, Rewards] = {}
    num_faults = 0
    for stage in STAGES:
        key = plan_evaluation(recipe, checkpoints[stage].checkpoint_id).stage_key
        rewards: dict[str, list[float]] = {}
        for row in read_evals(state, stage_keys=[key]):
            if row.is_valid:
                rewards.setdefault(f"{seed}/{row.task_id}", []).append(float(bool(row.success)))
            else:
                num_faults += 1
        if not rewards:
            raise BenchmarkError(f"{state.root} has no evaluation of {checkpoints[stage].checkpoint_id}")
        found[stage] = rewards
    return found, num_faults


def _spreads(
    state: StateDir, recipe: Recipe, checkpoints: Mapping[Stage, Checkpoint]
) -> dict[Stage, SeedSpread | None]:
    keys = {stage: plan_evaluation(recipe, checkpoints[stage].checkpoint_id).stage_key for stage in STAGES}
    return {stage: SeedSpread.of(rates_by_seed(read_evals(state, stage_keys=[key]))) for stage, key in keys.items()}


def _curve(
    state: StateDir, checkpoints: Mapping[Stage, Checkpoint], sampled: Mapping[Stage, Rewards], seed: int
) -> RewardCurve:
    updates: list[float] = []
    ends: list[int] = [0]
    for stage in (Stage.GSPO_PHASE1, Stage.GSPO_PHASE2):
        rows = run_query(
            state,
            "SELECT update, sum(num_successes)::DOUBLE / nullif(sum(num_valid), 0) FROM rollout_groups "
            f"WHERE stage_key = '{checkpoints[stage].checkpoint_id}' GROUP BY 1 ORDER BY 1",
        ).rows
        updates += [float(value) for _, value in rows if value is not None]
        ends.append(len(updates))
    heldout = [(end, _rate(sampled[stage])) for end, stage in zip(ends, STAGES, strict=True)]
    return RewardCurve(seed=seed, rollouts=updates, heldout=heldout)


def _num_injections(state: StateDir, checkpoints: Mapping[Stage, Checkpoint]) -> int:
    keys = ", ".join(f"'{checkpoints[stage].checkpoint_id}'" for stage in (Stage.GSPO_PHASE1, Stage.GSPO_PHASE2))
    return int(run_query(state, f"SELECT count(*) FROM injections WHERE stage_key IN ({keys})").rows[0][0])


def judge_runs(before: Sequence[SeedRun], after: Sequence[SeedRun], start: Stage, end: Stage) -> Effect:
    """Stage `end` of `after` against stage `start` of `before`, paired by seed; each seed is a run."""
    return judge_effect(
        compare_paired(_merged(before, start), _merged(after, end)),
        spread=SeedSpread.widest([run.spreads[start] for run in before]),
        run_differences=[
            _rate(right.sampled[end]) - _rate(left.sampled[start]) for left, right in zip(before, after, strict=True)
        ],
    )


def _merged(runs: Sequence[SeedRun], stage: Stage) -> Rewards:
    return {task: rewards for run in runs for task, rewards in run.sampled[stage].items()}


def print_runs(console: Console, title: str, runs: Sequence[SeedRun]) -> None:
    rows = []
    for run in runs:
        sampled = [f"{_rate(run.sampled[stage]):.1%}" for stage in STAGES]
        greedy = [f"{_rate(run.greedy[stage]):.1%}" for stage in STAGES]
        counts = (str(run.num_injections), str(run.num_faults))
        rows.append((str(run.seed), *sampled, *greedy, f"{run.minutes:.1f}", *counts))
    names = [str(stage) for stage in STAGES]
    rates = (*(f"{name} T=0.6" for name in names), *(f"{name} greedy" for name in names))
    columns = ("seed", *rates, "minutes", "replay joined", "faults")
    print_table(console, title, columns, rows)


def _points(compared: Comparison) -> str:
    return (
        f"{compared.before:.1%} to {compared.after:.1%}, {100 * compared.difference:+.1f} points "
        f"(95% {100 * compared.low:+.1f} to {100 * compared.high:+.1f}, {compared.num_tasks} tasks)"
    )


def _figures(runs: Sequence[SeedRun]) -> dict[str, Any]:
    return {
        "seeds": [run.seed for run in runs],
        "minutes": [round(run.minutes, 2) for run in runs],
        "sampled": [{str(stage): _rate(run.sampled[stage]) for stage in STAGES} for run in runs],
        "greedy": [{str(stage): _rate(rewards) for stage, rewards in run.greedy.items()} for run in runs],
        "injections": [run.num_injections for run in runs],
        "faults": [run.num_faults for run in runs],
    }


def _rate(rewards: Rewards) -> float:
    values = [sum(samples) / len(samples) for samples in rewards.values()]
    return sum(values) / len(values)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench-learning", description=__doc__)
    parser.add_argument("bench", nargs="?", choices=("demo", "dense", "sparse", "all"), default="all")
    parser.add_argument("--seeds", type=int, nargs="+", help="0 to 2 by default, the demo's 0 to 9")
    parser.add_argument("--folder", type=Path, default=Path("var/bench-learning"), help="a state folder for each seed")
    parser.add_argument("--picture", type=Path, default=Path("var/bench-learning/learning.png"))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
