"""The vocabulary of tasks: set-up verbs, getters and metrics. Each is one function, whose decorator and signature
declare how a task writes it. The pipeline checks suites against these declarations when it loads them. The env server
checks each task before it leases a desktop, and calls the functions."""
