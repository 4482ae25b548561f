"""The words that tasks are made of: set-up verbs, getters and metrics, each with its parameters, what it does and an
example. Both programs check tasks by them: a suite when it is loaded, the env server before it takes a desktop."""
