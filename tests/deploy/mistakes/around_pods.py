"""In what leads to pods, counts them or watches them."""

from tests.deploy.checks import network, policies, scaling
from tests.deploy.manifests import named
from tests.deploy.mistakes.planting import Mistake, config, container, pod

MISTAKES: dict[str, Mistake] = {
    "a port that the config does not listen on": (
        "base",
        lambda o: config(o, "metrics_listen: 0.0.0.0:7611", "metrics_listen: 0.0.0.0:9090"),
        network.ports_are_listened_on,
        "the config listens on",
    ),
    "a service that listens to its own pod only": (
        "demo-cpu",
        lambda o: config(o, "listen: 0.0.0.0:7601", "listen: 127.0.0.1:7601"),
        network.ports_are_listened_on,
        "does not listen on all addresses",
    ),
    "a probe of another port": (
        "base",
        lambda o: container(o, "verifier")["livenessProbe"]["grpc"].update(port=7600),
        network.ports_are_listened_on,
        "livenessProbe asks port 7600",
    ),
    "a misspelt selector": (
        "base",
        lambda o: named(o, "Service", "verifier")["spec"].update(selector={"app.kubernetes.io/name": "verifer"}),
        network.selectors_select,
        "selects no pods",
    ),
    "a drafter that is put beside nobody": (
        "base",
        lambda o: pod(o, "drafter")["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"][0][
            "podAffinityTerm"
        ].update(labelSelector={"matchLabels": {"app": "verifier"}}),
        network.selectors_select,
        "selects no pods",
    ),
    "an address that is no Service": (
        "kimi-k2-ep8",
        lambda o: config(o, "verifier: verifier:7601", "verifier: tandem-verifier:7601"),
        network.addresses_are_services,
        "which is no Service",
    ),
    "a Service that also leads to ranks that serve nobody": (
        "multi-node",
        lambda o: named(o, "Service", "verifier")["spec"]["selector"].pop("app.kubernetes.io/component"),
        network.addresses_are_services,
        "not rank 0 alone",
    ),
    "sessions that outlive the way to them": (
        "base",
        lambda o: named(o, "Service", "gateway")["spec"]["sessionAffinityConfig"]["clientIP"].update(timeoutSeconds=60),
        network.sessions_stick,
        "clients stick for 60 s",
    ),
    "Envoy's own timeout of 15 s": (
        "multi-node",
        lambda o: named(o, "BackendTrafficPolicy", "gateway")["spec"]["timeout"]["http"].update(requestTimeout="15s"),
        network.routes_stream,
        "cuts its streams",
    ),
    "a route to what the gateway does not serve": (
        "multi-node",
        lambda o: named(o, "GRPCRoute", "gateway")["spec"]["rules"][0]["matches"][0]["method"].update(
            service="tandem.v1.VerifierService"
        ),
        network.routes_stream,
        "no service tandem.v1.VerifierService",
    ),
    "a policy that shuts out the drafter": (
        "kimi-k2-ep8",
        lambda o: named(o, "NetworkPolicy", "verifier")["spec"]["ingress"][0]["from"].pop(),
        policies.policies_are_the_call_graph,
        "Deployment drafter does not reach Deployment verifier at TCP 7601",
    ),
    "DNS over UDP only": (
        "kimi-k2-ep8",
        lambda o: named(o, "NetworkPolicy", "dns")["spec"]["egress"][0]["ports"].pop(),
        policies.policies_are_the_call_graph,
        "does not reach dns at TCP 53",
    ),
    "a verifier that clients reach past the gateway": (
        "kimi-k2-ep8",
        lambda o: named(o, "NetworkPolicy", "verifier")["spec"]["ingress"][0].pop("from"),
        policies.policies_are_the_call_graph,
        "client reaches Deployment verifier at TCP 7601",
    ),
    "ranks that do not reach each other": (
        "multi-node",
        lambda o: o.remove(named(o, "NetworkPolicy", "ranks")),
        policies.policies_are_the_call_graph,
        "LeaderWorkerSet verifier worker does not reach LeaderWorkerSet verifier leader at TCP 29500",
    ),
    "a budget that never lets a node drain": (
        "base",
        lambda o: named(o, "PodDisruptionBudget", "drafter")["spec"].update(maxUnavailable=0),
        scaling.disruption_budgets_allow_one,
        "must be maxUnavailable 1",
    ),
    "gateways that may all be evicted at once": (
        "base",
        lambda o: o.remove(named(o, "PodDisruptionBudget", "gateway")),
        scaling.disruption_budgets_allow_one,
        "Deployment gateway: several pods",
    ),
    "replicas set against the autoscaler": (
        "multi-node",
        lambda o: named(o, "Deployment", "gateway")["spec"].update(replicas=2),
        scaling.autoscalers_own_replicas,
        "Deployment gateway: replicas",
    ),
    "a StatefulSet's hash on a Deployment": (
        "base",
        lambda o: pod(o, "gateway")["topologySpreadConstraints"][0].update(matchLabelKeys=["controller-revision-hash"]),
        scaling.pods_of_a_rollout_spread,
        "controller-revision-hash",
    ),
    "a monitor of a port that is not there": (
        "multi-node",
        lambda o: named(o, "PodMonitor", "verifier")["spec"]["podMetricsEndpoints"][0].update(port="http"),
        scaling.monitors_scrape,
        "serves no metrics at http",
    ),
    "a query of a metric that was renamed": (
        "multi-node",
        lambda o: named(o, "ScaledObject", "drafter")["spec"]["triggers"][0]["metadata"].update(
            query='sum(rate(tandem_drafter_busy_seconds_total{namespace="tandem"}[2m]))'
        ),
        scaling.queries_name_metrics,
        "no metric tandem_drafter_busy_seconds_total",
    ),
}
