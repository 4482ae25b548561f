"""Exit statuses of process 1 of a desktop."""

ENDED_FROM_INSIDE = 87
"""A program of the desktop disabled it. Only process 1 itself can set this status."""
