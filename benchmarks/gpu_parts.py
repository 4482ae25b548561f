"""The parts of the GPU measurement, each run in a separate process by benchmarks/bench_gpu.py:
`python -m benchmarks.gpu_parts NAME --size full|smoke --processor FOLDER --out FILE`."""

import argparse
import copy
import gc
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from benchmarks.gpu_bench import Bench, forget_peak, num_sampled, num_tokens, peak_bytes, stopwatch
from benchmarks.gpu_sglang import sglang
from benchmarks.gpu_sheet import NotMeasured, Sheet
from benchmarks.gpu_size import SIZES, Size, device_bytes, device_name, estimated_bytes, fitted, peak_tflops, shown_gb
from benchmarks.real_shape import UpdateKind
from benchmarks.real_turns import demonstration, image_patches, screen
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.runs.parity.exactness import compare_trajectories
from osworld_pipeline.training.objective.score import score_trajectories
from osworld_pipeline.training.packing import use_packed_attention

MAX_MEAN_DIFF = 0.02
"""Limit of the mean |packed - padded| of a token in bfloat16; the default of gspo.max_logprob_diff."""
MAX_FLOAT32_DIFF = 1e-4
"""Limit of the mean |trainer - sampler| of a token in float32."""
MAX_ROUNDING = 1.5
"""The sampler's bfloat16 may differ from float32 by this many times as much as the trainer's."""
MAX_APART = 3.0
"""In bfloat16, trainer and sampler may differ by this many times as much as the trainer differs from float32."""
EXACT_LEARNING_RATE = 1e-4
"""Large enough to change bfloat16 weights."""
ENGINE_BYTES = 5 << 30
"""Reserved for the engine's keys and values next to a trainer of all weights."""
CONTEXT_BUDGET_S = 40.0
"""The search for the longest context starts no further try after this."""


def exactness(size: Size, processor_folder: Path, sheet: Sheet) -> None:
    """All weights are trained, and the engine uses the same weights: sample, compare, update, repeatedly."""
    num_bytes = device_bytes()
    for_trainer = None if num_bytes is None else num_bytes - ENGINE_BYTES
    size = fitted(size, "gspo", context=size.context, num_bytes=for_trainer)
    _report_layers(size, sheet)
    bench = Bench(size, processor_folder)
    _check_updates(bench, "gspo", sheet)


def lora(size: Size, processor_folder: Path, sheet: Sheet) -> None:
    """Adapters are trained, and sampled unmerged: the same comparison."""
    bench = Bench(size, processor_folder, has_lora=True)
    _check_updates(bench, "gspo_lora", sheet)


def _check_updates(bench: Bench, kind: UpdateKind, sheet: Sheet) -> None:
    num_updates = bench.size.num_exact_updates
    limit = MAX_APART * _separate_rounding(bench, sheet)
    trainer = bench.open_trainer(kind, max_tokens=bench.size.context, learning_rate=EXACT_LEARNING_RATE)
    before = _sums(bench.model)
    with bench.engine() as engine:
        for update in range(num_updates + 1):
            with stopwatch() as seconds:
                # The last one reads each prompt from its beginning; the others keep keys and values between turns.
                trajectories = bench.sample(engine, f"u{update}", keeps_turns=update < num_updates)
            if update == 1:  # the first warms up
                sheet.figure("sampled tokens a second", f"{num_sampled(trajectories) / seconds[0]:.0f}")
            diff = _compare(bench, trajectories, bench.model, f"after {update} updates", sheet)
            sheet.claim(f"after {update} updates: at most {limit:.2g} on average", diff <= limit)
            if update == num_updates:
                break
            metrics = trainer.update(trajectories)
            engine.mark_updated(policy_version=trainer.num_updates)
            if update == 0:
                sheet.figure(
                    "sequences clipped in the first on-policy update", f"{metrics['first_step_clipped_share']:.1%}"
                )
            sheet.figure(f"update {update}: loss, gradient norm", f"{metrics['loss']:.4g}, {metrics['grad_norm']:.3g}")
            sheet.claim(
                f"update {update}: loss and gradient are finite", math.isfinite(metrics["loss"] + metrics["grad_norm"])
            )
    # An adapter's first factors do not change while the second ones are zero.
    moved = sum(_sums(bench.model)[name] != value for name, value in before.items())
    sheet.claim(f"trained tensors that moved: {moved} of {len(before)}", moved >= 0.4 * len(before))


def _separate_rounding(bench: Bench, sheet: Sheet) -> float:
    """Trainer and sampler in float32, where they must agree, and both in bfloat16 against float32. Returns the mean
    difference of the trainer's log-probabilities from float32."""
    wide = copy.deepcopy(bench.model).float()
    with bench.engine(wide) as engine:
        trajectories = bench.sample(engine, "wide")
    diff = _compare(bench, trajectories, wide, "both in float32", sheet)
    sheet.claim(f"both in float32: at most {MAX_FLOAT32_DIFF} on average", diff <= MAX_FLOAT32_DIFF)
    with bench.engine() as engine:
        trajectories = bench.sample(engine, "narrow")
    narrow_N, wide_N = (_response_scores(bench, model, trajectories) for model in (bench.model, wide))
    sampled_N = torch.cat([torch.tensor(one.sampled_logprobs)[_mask(one)] for one in trajectories])
    by_trainer, by_sampler = (float((scores_N - wide_N).abs().mean()) for scores_N in (narrow_N, sampled_N))
    sheet.figure(
        "|trainer - trainer in float32|, |sampler - trainer in float32|", f"{by_trainer:.2g}, {by_sampler:.2g}"
    )
    sheet.claim(
        f"the sampler rounds at most {MAX_ROUNDING} times as much as the trainer",
        by_sampler <= MAX_ROUNDING * by_trainer + MAX_FLOAT32_DIFF,
    )
    if bench.model.dtype != torch.float32:
        head = bench.model.lm_head
        bench.model.lm_head = RoundedHead(head.weight)
        try:
            rounded_N = _response_scores(bench, bench.model, trajectories)
        finally:
            bench.model.lm_head = head
        by_rounded, apart = ((rounded_N - other_N).abs().mean() for other_N in (wide_N, sampled_N))
        sheet.figure(
            "with logits rounded to bfloat16 by the trainer: |trainer - trainer in float32|, |trainer - sampler|",
            f"{float(by_rounded):.2g}, {float(apart):.2g}",
        )
    return max(by_trainer, MAX_FLOAT32_DIFF)


def _response_scores(bench: Bench, model: Any, trajectories: Sequence[Trajectory]) -> torch.Tensor:
    scores = score_trajectories(model, bench.processor, trajectories, cache=bench.cache)
    return torch.cat([row[_mask(one)] for row, one in zip(scores, trajectories, strict=True)])


def _mask(trajectory: Trajectory) -> torch.Tensor:
    return torch.tensor(trajectory.response_mask, dtype=torch.bool)


def _compare(bench: Bench, trajectories: Sequence[Trajectory], model: Any, when: str, sheet: Sheet) -> float:
    """The mean difference."""
    report = compare_trajectories(trajectories, model, bench.processor, cache=bench.cache)
    text = f"mean {report.mean_diff:.2g}, largest {report.max_diff:.2g}, {report.num_tokens} tokens"
    sheet.figure(f"|trainer - sampler| of a log-probability, {when}", text)
    return report.mean_diff


class RoundedHead(torch.nn.Module):
    """Logits as a bfloat16 model's own output layer computes them."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden_ND, self.weight)


def _sums(model: Any) -> dict[str, float]:
    return {
        name: float(param.detach().sum(dtype=torch.float64))
        for name, param in model.named_parameters()
        if param.requires_grad
    }


def packing(size: Size, processor_folder: Path, sheet: Sheet) -> None:
    """Demonstrations of mixed lengths, padded and then packed: the same log-probabilities, and the time of each."""
    bench = Bench(size, processor_folder, has_lora=True)
    mixed = [
        demonstration(
            bench.renderer,
            f"p{index}",
            [screen(1000 * index + turn, size.screen) for turn in range(1 + index % size.num_turns)],
            num_words=12 + 40 * (index % 3),
        )
        for index in range(size.num_packed)
    ]
    max_tokens = max(2 * size.context, max(len(one.token_ids) for one in mixed))
    scores: dict[bool, list[torch.Tensor]] = {}
    for is_packed in (False, True):
        if is_packed:
            use_packed_attention(bench.model)
            bench.is_packed = True
        trainer = bench.open_trainer("sft_lora", max_tokens=max_tokens, learning_rate=1e-12)
        scores[is_packed] = score_trajectories(
            bench.model, bench.processor, mixed, cache=bench.cache, max_tokens=max_tokens, is_packed=is_packed
        )
        trainer.update(mixed)
        with stopwatch() as seconds:
            metrics = trainer.update(mixed)
        text = f"{num_tokens(mixed) / seconds[0]:,.0f} tokens a second, {metrics['padding_share']:.0%} padding"
        sheet.figure("packed" if is_packed else "padded", text)
    pairs = zip(scores[False], scores[True], mixed, strict=True)
    diffs = torch.cat(
        [(padded - packed)[torch.tensor(one.response_mask).bool()].abs() for padded, packed, one in pairs]
    )
    sheet.figure(
        "|packed - padded| of a log-probability", f"mean {float(diffs.mean()):.2g}, largest {float(diffs.max()):.2g}"
    )
    sheet.claim(f"packed and padded differ by at most {MAX_MEAN_DIFF} on average", float(diffs.mean()) <= MAX_MEAN_DIFF)


def speed(size: Size, processor_folder: Path, sheet: Sheet) -> None:
    """Updates of all weights."""
    size = fitted(size, "gspo", context=size.context, num_bytes=device_bytes())
    _report_layers(size, sheet)
    _time_updates(size, processor_folder, ("gspo", "sft"), sheet)


def speed_lora(size: Size, processor_folder: Path, sheet: Sheet) -> None:
    """Updates of adapters."""
    _time_updates(size, processor_folder, ("gspo_lora", "sft_lora"), sheet)


def _time_updates(size: Size, processor_folder: Path, kinds: Sequence[UpdateKind], sheet: Sheet) -> None:
    bench = Bench(size, processor_folder, has_lora=kinds[0].endswith("lora"))
    trajectories = bench.sequences(size.context, size.num_sequences)
    patches = image_patches(bench.processor, trajectories)
    peak_rate = peak_tflops(device_name())
    for kind in kinds:
        forget_peak()
        trainer = bench.open_trainer(kind, max_tokens=size.context)
        if kind.startswith("gspo"):
            trajectories = _as_sampled(bench, trajectories)
        times = []
        for _ in range(size.num_updates + 1):
            with stopwatch() as seconds:
                trainer.update(trajectories)
            times += seconds
        second = statistics.median(times[1:])
        rate = size.architecture.update_flops(kind, trajectories, patches) / second / 1e12
        share = f"{rate / peak_rate:.1%} of {peak_rate:g}" if peak_rate else "peak unknown"
        name = kind.replace("_", ", ")
        sheet.figure(
            f"{name}: {size.num_sequences} sequences of {size.context:,} tokens, {len(patches)} screens",
            f"{second:.2f} s, {num_tokens(trajectories) / second:,.0f} tokens/s, {rate:.1f} TFLOP/s (MFU {share})",
        )
        held, estimated = peak_bytes(), estimated_bytes(size, kind, context=size.context)
        # The CUDA context is in the estimate, but not in torch's count.
        sheet.figure(
            f"{name}: peak memory of torch, and the estimate",
            f"{'not counted on a CPU' if held is None else shown_gb(held)}, {shown_gb(estimated)}",
        )
        if held is not None:
            sheet.claim(f"{name}: no more memory than estimated", held <= estimated)
        del trainer
        gc.collect()


def _as_sampled(bench: Bench, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Add the log-probabilities that a sampler of these weights reports; without them an update is refused."""
    scores = score_trajectories(bench.model, bench.processor, trajectories, cache=bench.cache)
    return [
        replace(one, sampled_logprobs=tuple(logprobs.tolist()))
        for one, logprobs in zip(trajectories, scores, strict=True)
    ]


def context(size: Size, processor_folder: Path, sheet: Sheet) -> None:
    """The longest sequence whose SFT update fits, all weights trained."""
    size = fitted(size, "sft", context=size.context, num_bytes=device_bytes())
    _report_layers(size, sheet)
    _report_longest(size, processor_folder, "sft", sheet)


def context_lora(size: Size, processor_folder: Path, sheet: Sheet) -> None:
    """The longest sequence whose SFT update fits, adapters trained."""
    _report_longest(size, processor_folder, "sft_lora", sheet)


def _report_longest(size: Size, processor_folder: Path, kind: UpdateKind, sheet: Sheet) -> None:
    bench = Bench(size, processor_folder, has_lora=kind.endswith("lora"))
    trainer = bench.open_trainer(kind, max_tokens=size.largest_context)

    def is_fitting(num: int) -> bool:
        try:
            trainer.update(bench.sequences(num, 1))
        except torch.OutOfMemoryError:
            return False
        finally:
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return True

    longest, is_bound = longest_fitting(
        is_fitting, first=size.context, limit=size.largest_context, step=size.context_step, budget_s=CONTEXT_BUDGET_S
    )
    sheet.figure(
        "longest sequence that fits",
        f"{longest:,} tokens" if is_bound else f"at least {longest:,} tokens; the search stopped there",
    )
    sheet.claim("a sequence of the recipe's length fits", longest >= min(size.context, size.largest_context))


def longest_fitting(
    is_fitting: Callable[[int], bool], *, first: int, limit: int, step: int, budget_s: float
) -> tuple[int, bool]:
    """The longest length found to fit, up to `limit`, or 0; and whether a length at most `step` above it failed. No
    further length is tried after `budget_s`."""
    deadline = time.monotonic() + budget_s
    fits, fails, tried = 0, 0, min(first, limit)
    while time.monotonic() < deadline:
        if is_fitting(tried):
            fits = tried
        else:
            fails = tried
        if fits == limit or (fails and fails - fits <= step):
            break
        tried = (fits + fails) // 2 if fails else min(2 * fits, limit)
    return fits, bool(fails) and fails - fits <= step


def _report_layers(size: Size, sheet: Sheet) -> None:
    """Report the number of trained layers, which may be lower than in the published shape."""
    full, fitting = SIZES[size.name].architecture.num_layers, size.architecture.num_layers
    text = f"all {full}" if fitting == full else f"{fitting} of {full}: more do not fit when all weights are trained"
    sheet.figure("layers of the language model", text)


PARTS: dict[str, Callable[[Size, Path, Sheet], None]] = {
    "exactness": exactness,
    "lora": lora,
    "packing": packing,
    "speed": speed,
    "speed_lora": speed_lora,
    "context": context,
    "context_lora": context_lora,
    "sglang": sglang,
}
"""The parts in the order in which they run, the most important first."""


def run_part(name: str, size: Size, processor_folder: Path, sheet: Sheet) -> None:
    """Run a part; its status or error is always written to the sheet."""
    started = time.monotonic()
    sheet.result.device = device_name()
    sheet.result.status = "timed out"  # remains if the process is killed
    sheet.write()
    try:
        PARTS[name](size, processor_folder, sheet)
        sheet.result.status = "ok"
    except NotMeasured as reason:
        sheet.result.status, sheet.result.error = "not run", str(reason)
    except Exception as error:  # noqa: BLE001 - a part that fails must keep its figures and not stop other parts
        sheet.result.status = "failed"
        sheet.result.error = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        traceback.print_exc()
    sheet.result.seconds = round(time.monotonic() - started, 1)
    sheet.write()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu-parts", description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--processor", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(argv)
    transformers_logging.disable_progress_bar()
    sheet = Sheet(arguments.part, file=arguments.out)
    run_part(arguments.part, SIZES[arguments.size], arguments.processor, sheet)
    return 0 if sheet.result.is_ok or sheet.result.status == "not run" else 1


if __name__ == "__main__":
    sys.exit(main())
