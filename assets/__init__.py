"""Nouns: what the pipeline makes, as Dagster assets. Each reads ids, calls one library function, returns counts."""
