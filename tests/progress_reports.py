"""What a callback for progress received."""

from collections.abc import Sequence

from osworld_pipeline.progress import Progress


def last_of_each(reports: Sequence[Progress]) -> dict[str, tuple[int, int, str]]:
    """Done, total and unit of the last report of each kind of work, in the order of the first ones."""
    return {one.what: (one.done, one.total, one.unit) for one in reports}


def never_falls(reports: Sequence[Progress]) -> bool:
    """Whether the work done of each kind grows up to its total."""
    done: dict[str, int] = {}
    for one in reports:
        if one.done < done.get(one.what, 0) or (one.total and one.done > one.total):
            return False
        done[one.what] = one.done
    return True
