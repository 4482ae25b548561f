"""The Dagster assets of the pipeline. Each reads ids, calls one library function and returns counts."""
