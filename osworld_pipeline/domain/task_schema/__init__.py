"""The vocabulary of tasks: set-up verbs, getters and metrics, each with its parameters, its effect and an example. Both
programs check tasks against it: the pipeline when it loads a suite, the env server before it leases a desktop."""
