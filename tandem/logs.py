"""Logging as operators read it: one line per event, time in UTC, the service's name, key=value pairs."""

import logging
import time


def setup_logging(service: str, level: str) -> None:
    """Log to stderr; call once per process."""
    formatter = logging.Formatter(
        f"%(asctime)s.%(msecs)03dZ %(levelname)-7s {service} %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
