"""Manifests against the config that their pods read, and against the code that reads it."""

import argparse
import contextlib
import functools
import io
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import yaml
from torch.distributed.run import get_args_parser

from tandem.config import StackConfig
from tests.deploy.manifests import (
    MODULES,
    BrokenConfigError,
    Object,
    Workload,
    config_of,
    config_texts,
    mount_of,
    tandem_workloads,
)

_ROOT = Path(__file__).parents[3]
_MARGIN_SECONDS = 10
"""What a service may take to end, beyond its calls in flight: the verifier gives its ranks 5 s."""

_GIVEN = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "0", "LWS_LEADER_ADDRESS": "verifier-0.verifier.tandem"}
"""What LeaderWorkerSet puts before a container's own variables."""

_READ_BY_LIBRARIES = {"HOME"}
"""By torch, Triton and CUDA, for caches."""


def configs_load(objects: list[Object]) -> list[str]:
    """Every pod finds a config, which loads."""
    problems = []
    for w in tandem_workloads(objects):
        try:
            config_of(objects, w)
        except BrokenConfigError as error:
            problems.append(str(error))
    return problems


def commands_parse(objects: list[Object]) -> list[str]:
    """By the services' own parsers, and torchrun's."""
    problems = []
    for w in tandem_workloads(objects):
        assert w.module
        python, *arguments = w.command
        if python != "python" or arguments[0] != "-m":
            problems.append(f"{w.name}: {w.command} is not `python -m`")
            continue
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                if (torchrun := _torchrun(w)) is not None:
                    arguments = ["-m", torchrun.training_script, *torchrun.training_script_args]
                read = _configs_that_are_read(w.module, tuple(arguments[2:]))
        except SystemExit:
            problems.append(f"{w.name}: {said.getvalue().strip().splitlines()[-1]}")
            continue
        if arguments[1] != w.module or not all(mount_of(w, path) for path in read):
            problems.append(f"{w.name}: runs {arguments[1]} with {read}")
    return problems


def environment_is_read(objects: list[Object]) -> list[str]:
    """No variable is set that nothing reads, and none is used that nobody sets."""
    problems = []
    for w in tandem_workloads(objects):
        names = {e["name"] for e in w.container.get("env", [])}
        given = set(_GIVEN) if w.owner["kind"] == "LeaderWorkerSet" else set()
        used = set(re.findall(r"\$\((\w+)\)", " ".join(w.command)))
        problems += [f"{w.name}: nothing reads {name}" for name in names - _read_by_us() - _READ_BY_LIBRARIES - used]
        problems += [f"{w.name}: $({name}) is not set" for name in used - names - given]
    return problems


def gpus_are_ranks(objects: list[Object]) -> list[str]:
    """The verifier has a GPU for each rank, if any; a drafter has one if its config says cuda; a gateway has none."""
    problems = []
    for w in tandem_workloads(objects):
        config = config_of(objects, w)
        if w.module == "verifier_service":
            ranks, nodes = _ranks(w)
            expected = config.verifier.parallel.ep if config.verifier.device == "cuda" else 0
            torchrun = _torchrun(w)
            if torchrun is not None and nodes * int(torchrun.nproc_per_node) != config.verifier.parallel.ep:
                problems.append(
                    f"{w.name}: {nodes} nodes of {torchrun.nproc_per_node} ranks for ep {config.verifier.parallel.ep}"
                )
        else:
            ranks = w.gpus
            expected = 1 if w.module == "drafter_service" and config.drafter.device == "cuda" else 0
        if ranks != expected:
            problems.append(f"{w.name}: {ranks} GPUs, the config asks for {expected}")
    return problems


def threads_fit(objects: list[Object]) -> list[str]:
    """Without `threads` a process takes all cores of its node; with it, no more than are requested for it."""
    problems = []
    for w in tandem_workloads(objects):
        if w.module == "gateway":
            continue
        config = config_of(objects, w)
        section = config.verifier if w.module == "verifier_service" else config.drafter
        nodes = _ranks(w)[1]
        ranks = config.verifier.parallel.ep // nodes if w.module == "verifier_service" else 1
        cores = int(w.container["resources"]["requests"]["cpu"])
        if section.threads is None or section.threads * ranks > cores:
            problems.append(f"{w.name}: {ranks} processes of {section.threads} threads on {cores} cores")
        if "cpu" in w.container["resources"]["limits"]:
            problems.append(f"{w.name}: has a CPU limit, which throttles it")
    return problems


def grace_covers_streams(objects: list[Object]) -> list[str]:
    """SIGKILL comes after preStop, the calls in flight and a margin; over several nodes every node waits for rank 0."""
    problems = []
    for w in tandem_workloads(objects):
        config = config_of(objects, w)
        pre_stop = _pre_stop(w)
        if w.module != "drafter_service" and w.serves and pre_stop == 0:
            problems.append(f"{w.name}: no preStop: calls would still come when it has ended")
        # A drafter has no calls to wait for.
        streams = {"gateway": config.gateway.shutdown_grace_seconds, "drafter_service": 0.0}
        needed = streams.get(w.module or "", config.verifier.shutdown_grace_seconds) + _MARGIN_SECONDS
        torchrun = _torchrun(w)
        if torchrun is not None:
            # Ranks of all pods get SIGTERM at about the same time, rank 0's pod after its preStop.
            leader = max(_pre_stop(other) for other in tandem_workloads(objects) if other.owner is w.owner)
            if torchrun.shutdown_timeout < leader + needed:
                kills = torchrun.shutdown_timeout
                problems.append(f"{w.name}: torchrun kills after {kills} s, {leader + needed:g} needed")
            needed = torchrun.shutdown_timeout + _MARGIN_SECONDS
        grace = w.spec.get("terminationGracePeriodSeconds", 30)
        if grace < pre_stop + needed:
            problems.append(f"{w.name}: killed after {grace} s, {pre_stop + needed:g} needed")
    return problems


def models_are_mounted(objects: list[Object]) -> list[str]:
    """The config's folders are in the volume of models; services of one tree share one config."""
    problems = []
    texts = set()
    for w in tandem_workloads(objects):
        text, *_ = config_texts(objects, w)
        texts.add(config_texts(objects, w))
        for key in ("target", "draft_model"):
            folder = yaml.safe_load(text)[key]
            _, volume = mount_of(w, folder) or ({}, {})
            if "persistentVolumeClaim" not in volume:
                problems.append(f"{w.name}: {key} {folder} is in no volume of models")
    return problems + (["services read different configs"] if len(texts) > 1 else [])


def _ranks(w: Workload) -> tuple[int, int]:
    """GPUs of the workload's whole target, and the nodes they are on."""
    nodes = w.owner["spec"]["leaderWorkerTemplate"]["size"] if w.owner["kind"] == "LeaderWorkerSet" else 1
    return w.gpus * nodes, nodes


def _pre_stop(w: Workload) -> int:
    return w.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)


def _torchrun(w: Workload) -> argparse.Namespace | None:
    """torchrun's arguments, if it starts the ranks. SystemExit if it would not take them."""
    if w.command[:3] != ["python", "-m", "torch.distributed.run"]:
        return None
    given = re.compile("|".join(rf"\$\({name}\)" for name in _GIVEN))
    command = [given.sub(lambda match: _GIVEN[match[0][2:-1]], word) for word in w.command[3:]]
    return get_args_parser().parse_args(command)


@functools.cache
def _configs_that_are_read(module: str, arguments: tuple[str, ...]) -> tuple[str, ...]:
    """The files that the service's `__main__` reads, given these. SystemExit if its parser refuses them."""

    class Read(Exception):
        pass

    def read(*paths: Path) -> StackConfig:
        raise Read(*map(str, paths))

    with (
        mock.patch.object(sys, "argv", [module, *arguments]),
        mock.patch("tandem.config.load_config", read),
        mock.patch("tandem.service_main.load_config", read),
    ):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except Read as files:
            return files.args
    raise AssertionError(f"{module} read no config")


@functools.cache
def _read_by_us() -> frozenset[str]:
    names: set[str] = set()
    for package in ("tandem", *MODULES):
        for file in (_ROOT / package).rglob("*.py"):
            names |= set(re.findall(r"environ(?:\.\w+)?[\[(]\"([A-Z_]+)\"", file.read_text()))
    return frozenset(names)
