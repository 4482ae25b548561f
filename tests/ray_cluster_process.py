"""Holds the embedded Ray until it is stopped; prints its address. Tests kill it as a launcher may be killed."""

import json
import os
import signal
import sys
import threading
from pathlib import Path

from osworld_pipeline.runs.launch.local_ray import local_ray
from osworld_pipeline.runs.placement import RayResources

if __name__ == "__main__":
    is_over = threading.Event()
    signal.signal(signal.SIGTERM, lambda signum, frame: is_over.set())
    with local_ray(Path(sys.argv[1]), [RayResources(cpus=int(sys.argv[2]))]) as cluster:
        print(json.dumps({"url": cluster.url, "token": cluster.token, "pid": os.getpid()}), flush=True)
        is_over.wait()
