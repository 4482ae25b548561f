"""Checks what this machine has and lacks for each role, and how to fix it. Dagster and the env server are run as
separate programs, so that a hanging program is killed and a missing one is a finding."""
