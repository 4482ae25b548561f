"""How a desktop may end."""

ENDED_FROM_INSIDE = 87
"""Exit status of process 1 where a program of the desktop ended it or held it up. Nobody else can choose it."""
