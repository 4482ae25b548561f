"""What this machine has and lacks for each role, and how to get it. Knows neither Dagster nor the env server: it asks
both as programs, so that what hangs is ended and what is not installed is a finding."""
