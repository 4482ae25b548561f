"""Checks what this machine has and lacks for each role, and names remedies. Dagster and the env server are run as
separate programs, so that a hanging program is killed and a missing one is a finding."""
