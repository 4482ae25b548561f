"""The programs, one per stage. Each is `main(job, report) -> result`, started in a process of its own by
`python -m osworld_pipeline.runs <program>` with its job as JSON on standard input."""
