"""Comparison of engines with the checkpoint that they sample."""
