"""Policy engines, which sample responses."""
