from osworld_pipeline.cli import main

main()
