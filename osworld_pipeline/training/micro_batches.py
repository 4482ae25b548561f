"""Assigns trajectories to forward passes and ranks.

Every rank makes the same number of passes, because each pass exchanges sharded weights among all ranks. The passes of
one round have similar sizes, so that no rank waits long.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.training.memory.fits import check_length


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The work of one rank in one round."""

    trajectories: tuple[Trajectory, ...]
    is_dummy: bool = False
    """A copy of another rank's work, run only for the collectives; its result is discarded."""


def make_micro_batches(
    trajectories: Sequence[Trajectory],
    *,
    num_ranks: int = 1,
    max_tokens: int,
    max_sequences: int | None = None,
    is_packed: bool = False,
) -> list[list[MicroBatch]]:
    """Rounds, each with a micro-batch for every rank. A round never mixes passes with and without images, because only
    the former use the vision tower.

    Raises:
        TrainingError: a trajectory has more than `max_tokens` tokens; names it.
    """
    for trajectory in trajectories:
        check_length(trajectory, max_tokens=max_tokens)
    rounds: list[list[MicroBatch]] = []
    for with_images in (True, False):
        chosen = [item for item in trajectories if bool(len(item.images)) is with_images]
        if num_ranks == 1:
            parts = split_by_size(chosen, max_tokens=max_tokens, max_sequences=max_sequences, is_packed=is_packed)
        else:
            parts = _split_for_all(chosen, num_ranks, max_tokens, max_sequences, is_packed)
        for start in range(0, len(parts), num_ranks):
            micro_batches = [MicroBatch(trajectories=tuple(part)) for part in parts[start : start + num_ranks]]
            missing = num_ranks - len(micro_batches)
            # The smallest pass of the round is the cheapest dummy.
            micro_batches += [MicroBatch(trajectories=micro_batches[-1].trajectories, is_dummy=True)] * missing
            rounds.append(micro_batches)
    return rounds


def _split_for_all(
    trajectories: Sequence[Trajectory], num_ranks: int, max_tokens: int, max_sequences: int | None, is_packed: bool
) -> list[list[Trajectory]]:
    """Parts of at most an equal share of the tokens per rank (or of the longest trajectory's tokens, if that is more),
    the largest first. There may be fewer parts than ranks."""
    if not trajectories:
        return []
    lengths = [len(trajectory.token_ids) for trajectory in trajectories]
    share = max(max(lengths), -(-sum(lengths) // num_ranks))
    parts = split_by_size(
        trajectories, max_tokens=min(max_tokens, share), max_sequences=max_sequences, is_packed=is_packed
    )
    return sorted(parts, key=lambda part: -sum(len(item.token_ids) for item in part))


def split_by_size(
    trajectories: Sequence[Trajectory],
    *,
    max_tokens: int,
    max_sequences: int | None = None,
    is_packed: bool = False,
) -> list[list[Trajectory]]:
    """Parts of at most `max_tokens` tokens, including padding. Padded parts hold sequences of similar length; packed
    ones are filled with the longest sequence that still fits."""
    ordered = sorted(trajectories, key=lambda item: (len(item.token_ids), item.trajectory_id))
    return (_fill if is_packed else _chop)(ordered, max_tokens, max_sequences or len(ordered))


def _chop(ordered: Sequence[Trajectory], max_tokens: int, max_sequences: int) -> list[list[Trajectory]]:
    parts: list[list[Trajectory]] = []
    for trajectory in ordered:
        last = parts[-1] if parts else []
        if not last or len(last) == max_sequences or len(trajectory.token_ids) * (len(last) + 1) > max_tokens:
            parts.append([trajectory])
        else:
            last.append(trajectory)
    return parts


def _fill(ordered: Sequence[Trajectory], max_tokens: int, max_sequences: int) -> list[list[Trajectory]]:
    parts: list[list[Trajectory]] = []
    room: list[int] = []
    for trajectory in reversed(ordered):
        num_tokens = len(trajectory.token_ids)
        fitting = (index for index, free in enumerate(room) if free >= num_tokens and len(parts[index]) < max_sequences)
        index = next(fitting, None)
        if index is None:
            parts.append([trajectory])
            room.append(max_tokens - num_tokens)
        else:
            parts[index].append(trajectory)
            room[index] -= num_tokens
    return parts
