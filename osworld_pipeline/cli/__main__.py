from osworld_pipeline.cli import run

run()
