"""What must be true of rendered manifests. A check takes the objects of a tree and returns its problems, one a line."""

from collections.abc import Callable

from tests.deploy.checks import configs, network, pods, policies, scaling, schemas, tls
from tests.deploy.manifests import Object

Check = Callable[[list[Object]], list[str]]

CHECKS: list[Check] = [
    schemas.core_1_34,
    schemas.core_1_37,
    schemas.custom_resources,
    configs.configs_load,
    configs.commands_parse,
    configs.environment_is_read,
    configs.gpus_are_ranks,
    configs.threads_fit,
    configs.grace_covers_streams,
    configs.models_are_mounted,
    pods.pods_are_restricted,
    pods.images_are_of_one_release,
    pods.volumes_are_mounted,
    pods.memory_holds_shm,
    pods.probes_ask_what_is_served,
    pods.rollouts_have_room,
    network.ports_are_listened_on,
    network.selectors_select,
    network.addresses_are_services,
    policies.policies_are_the_call_graph,
    network.sessions_stick,
    network.routes_stream,
    tls.tls_is_of_both_ends,
    tls.certificates_are_mounted,
    tls.certificates_are_signed,
    tls.proxies_know_of_tls,
    scaling.disruption_budgets_allow_one,
    scaling.autoscalers_own_replicas,
    scaling.pods_of_a_rollout_spread,
    scaling.monitors_scrape,
    scaling.queries_name_metrics,
]
