"""Policy engines: where responses are sampled."""
