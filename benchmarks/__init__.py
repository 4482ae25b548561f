"""Benchmarks of speed and cost, measured against named baselines. The `bench-*` targets of the Makefile run them."""
