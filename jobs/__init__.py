"""Verbs: the jobs, and the demo that runs one of them on this machine."""
