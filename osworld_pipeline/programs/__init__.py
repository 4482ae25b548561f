"""What the command line programs have in common: their JSON output, and how they fail. `osworld-pipeline`, `env-server`
and `osworld-gateway` use it."""
