"""The library used by the Dagster assets. Only `definitions`, `compute_logs` and `cli` import Dagster."""
