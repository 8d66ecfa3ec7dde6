"""The page for people without Grafana: live figures of the verifier, served beside the gateway's metrics."""
