"""In pods, and in the config that they read."""

from tests.deploy.checks import configs, pods, schemas
from tests.deploy.manifests import named
from tests.deploy.mistakes.planting import Mistake, command_word, config, container, group, pod

MISTAKES: dict[str, Mistake] = {
    "a misspelt field of the core API": (
        "base",
        lambda o: pod(o, "gateway").update(terminationGracePeriod=60),
        schemas.core_1_34,
        "terminationGracePeriod",
    ),
    "a probe's port by name": (
        "base",
        lambda o: container(o, "gateway")["readinessProbe"]["grpc"].update(port="grpc"),
        schemas.core_1_37,
        "is not of type 'integer'",
    ),
    "a misspelt field in a LeaderWorkerSet's pods": (
        "multi-node",
        lambda o: group(o)["workerTemplate"]["spec"].update(toleration=[]),
        schemas.core_1_37,
        "toleration",
    ),
    "a timeout in a GRPCRoute, which has none": (
        "multi-node",
        lambda o: named(o, "GRPCRoute", "gateway")["spec"]["rules"][0].update(timeouts={"request": "0s"}),
        schemas.custom_resources,
        "timeouts",
    ),
    "an unknown key in the config": (
        "kimi-k2-ep8",
        lambda o: config(o, "kv_blocks", "kv_block"),
        configs.configs_load,
        "verifier.kv_block: unknown key",
    ),
    "a ConfigMap that is not there": (
        "base",
        lambda o: pod(o, "drafter")["volumes"][0]["configMap"].update(name="tandem"),
        configs.configs_load,
        "in no ConfigMap",
    ),
    "a misspelt flag": (
        "base",
        lambda o: command_word(container(o, "verifier"), "--config", "--conifg"),
        configs.commands_parse,
        "the following arguments are required: --config",
    ),
    "a flag that torchrun does not have": (
        "multi-node",
        lambda o: command_word(group(o)["leaderTemplate"]["spec"]["containers"][0], "--nproc-per-node=4", "--gpus=4"),
        configs.commands_parse,
        "unrecognized",
    ),
    "a variable that nothing reads": (
        "base",
        lambda o: container(o, "verifier")["env"].append({"name": "TANDEM_LOG", "value": "debug"}),
        configs.environment_is_read,
        "nothing reads TANDEM_LOG",
    ),
    "a variable that nobody sets": (
        "multi-node",
        lambda o: command_word(
            group(o)["workerTemplate"]["spec"]["containers"][0],
            "--master-addr=$(LWS_LEADER_ADDRESS)",
            "--master-addr=$(MASTER_ADDR)",
        ),
        configs.environment_is_read,
        "$(MASTER_ADDR) is not set",
    ),
    "fewer GPUs than ranks": (
        "kimi-k2-ep8",
        lambda o: container(o, "verifier")["resources"]["limits"].update({"nvidia.com/gpu": "4"}),
        configs.gpus_are_ranks,
        "4 GPUs, the config asks for 8",
    ),
    "a node more than the ranks need": (
        "multi-node",
        lambda o: group(o).update(size=3),
        configs.gpus_are_ranks,
        "3 nodes of 4 ranks for ep 8",
    ),
    "a drafter on a GPU that it did not ask for": (
        "multi-node",
        lambda o: container(o, "drafter")["resources"]["limits"].pop("nvidia.com/gpu"),
        configs.gpus_are_ranks,
        "0 GPUs, the config asks for 1",
    ),
    "more threads than cores": (
        "kimi-k2-ep8",
        lambda o: config(o, "threads: 4", "threads: 8"),
        configs.threads_fit,
        "8 processes of 8 threads on 32 cores",
    ),
    "streams that outlive their pod": (
        "base",
        lambda o: pod(o, "gateway").update(terminationGracePeriodSeconds=60),
        configs.grace_covers_streams,
        "killed after 60 s, 325 needed",
    ),
    "a config whose grace outgrew the manifests": (
        "kimi-k2-ep8",
        lambda o: config(o, "shutdown_grace_seconds: 300", "shutdown_grace_seconds: 600"),
        configs.grace_covers_streams,
        "620 needed",
    ),
    "torchrun's own grace, which is 30 s": (
        "multi-node",
        lambda o: command_word(
            group(o)["workerTemplate"]["spec"]["containers"][0], "--shutdown-timeout=330", "--shutdown-timeout=30"
        ),
        configs.grace_covers_streams,
        "torchrun kills after 30 s",
    ),
    "a gateway that ends while calls still come": (
        "base",
        lambda o: container(o, "gateway").pop("lifecycle"),
        configs.grace_covers_streams,
        "no preStop",
    ),
    "a target outside the volume": (
        "kimi-k2-ep8",
        lambda o: config(o, "/models/kimi-k2.6\n", "/data/kimi-k2.6\n"),
        configs.models_are_mounted,
        "in no volume of models",
    ),
    "a root file system that can be written": (
        "base",
        lambda o: container(o, "drafter")["securityContext"].update(readOnlyRootFilesystem=False),
        pods.pods_are_restricted,
        "Deployment drafter: readOnlyRootFilesystem",
    ),
    "a user by name only": (
        "base",
        lambda o: pod(o, "verifier")["securityContext"].pop("runAsUser"),
        pods.pods_are_restricted,
        "Deployment verifier: runAsUser",
    ),
    "images of two releases": (
        "kimi-k2-ep8",
        lambda o: container(o, "drafter").update(image="registry.example.com/tandem-worker:0.0.9"),
        pods.images_are_of_one_release,
        "0.0.9",
    ),
    "a claim that nobody makes": (
        "base",
        lambda o: pod(o, "verifier")["volumes"][1]["persistentVolumeClaim"].update(claimName="models"),
        pods.volumes_are_mounted,
        "no claim models",
    ),
    "a cache on the read-only root": (
        "base",
        lambda o: container(o, "verifier")["env"][0].update(value="/root"),
        pods.volumes_are_mounted,
        "HOME /root cannot be written",
    ),
    "shared memory as large as all memory": (
        "base",
        lambda o: container(o, "verifier")["resources"]["limits"].update(memory="16Gi"),
        pods.memory_holds_shm,
        "may be /dev/shm",
    ),
    "a service name that the code does not register": (
        "base",
        lambda o: container(o, "drafter")["readinessProbe"]["grpc"].update(service="tandem.v1.DrafterService"),
        pods.probes_ask_what_is_served,
        "tandem.v1.DrafterService",
    ),
    "a gateway that is restarted when the verifier is away": (
        "base",
        lambda o: container(o, "gateway")["livenessProbe"]["grpc"].update(service="tandem.v1.GenerationService"),
        pods.probes_ask_what_is_served,
        "livenessProbe asks",
    ),
    "a rollout that needs a second node of GPUs": (
        "base",
        lambda o: named(o, "Deployment", "verifier")["spec"].update(strategy={"type": "RollingUpdate"}),
        pods.rollouts_have_room,
        "needs 8 GPUs more",
    ),
    "a rollout given up while the weights load": (
        "base",
        lambda o: named(o, "Deployment", "verifier")["spec"].pop("progressDeadlineSeconds"),
        pods.rollouts_have_room,
        "less than the 3600 s",
    ),
}
