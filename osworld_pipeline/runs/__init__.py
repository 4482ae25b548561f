"""The programs: recording, training, evaluation, collection and verification. Each is a function
`main(job, report) -> result` and runs in its own process, started by `python -m osworld_pipeline.runs <program>` with
its job as JSON on standard input."""
