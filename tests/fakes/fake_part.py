"""A service process for tests of the supervisor: serves gRPC health, and misbehaves as told.

python fake_part.py --port N [--service NAME] [--serving-after S] [--die-after S --code N]
                    [--ignore-sigterm] [--grandchild]
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--service", default="fake")
    parser.add_argument("--serving-after", type=float, default=0.0)
    parser.add_argument("--die-after", type=float)
    parser.add_argument("--code", type=int, default=0)
    parser.add_argument("--ignore-sigterm", action="store_true")
    parser.add_argument("--grandchild", action="store_true")
    options = parser.parse_args()

    stop = threading.Event()

    def on_sigterm(number: int, frame: FrameType | None) -> None:
        print(f"sigterm at {time.monotonic()}", flush=True)
        if not options.ignore_sigterm:
            stop.set()

    signal.signal(signal.SIGTERM, on_sigterm)
    print(f"pid {os.getpid()}", flush=True)
    if options.grandchild:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(f"grandchild {child.pid}", flush=True)

    servicer = health.HealthServicer()
    server = grpc.server(ThreadPoolExecutor(4))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    server.add_insecure_port(f"127.0.0.1:{options.port}")
    server.start()
    time.sleep(options.serving_after)
    print(f"serving at {time.monotonic()}", flush=True)
    servicer.set(options.service, health_pb2.HealthCheckResponse.SERVING)
    if options.die_after is not None:
        stop.wait(options.die_after)
        print("dying", flush=True)
        os._exit(options.code)
    stop.wait()
    server.stop(0)


if __name__ == "__main__":
    main()
