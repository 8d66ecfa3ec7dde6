"""`python -m gateway --config x.yaml`"""

from gateway.app import run_gateway
from tandem.service_main import service_main

if __name__ == "__main__":
    service_main("gateway", lambda config: config.gateway, run_gateway)
