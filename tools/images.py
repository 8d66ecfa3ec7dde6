"""`make images`: build both images, run the demo stack from them as its manifests say, ask it, clean up.

    python -m tools.images --base-image docker.io/library/python:3.12-slim

As root on Debian or Ubuntu. Builds by buildah and runs by podman, in a storage of its own that is removed at the end.
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import yaml

from tools.pip_settings import pip_settings
from tools.pods import PodContainer, pod_containers

ROOT = Path(__file__).parents[1]
OVERLAY = ROOT / "k8s/overlays/demo-cpu"
PACKAGES = {
    "buildah": "buildah",
    "podman": "podman",
    "runc": "runc",
    "mmdebstrap": "mmdebstrap",
    "/usr/lib/podman/netavark": "netavark",
    "/usr/lib/podman/aardvark-dns": "aardvark-dns",
    "iptables": "iptables",
}
"""Debian's packages, by a file that each brings."""
PULLED_BASE, LOCAL_BASE = "docker.io/library/python:3.12-slim", "localhost/debian-python"
LIMITS = ["--ulimit=nofile=4096:4096", "--ulimit=nproc=4096:4096"]
"""Podman's own are higher than a process may set that is itself in a container."""
QUESTION, ANSWER = "Why is the sky blue?", "light"
READY_SECONDS = 180
Done = subprocess.CompletedProcess[str]


class Engine:
    """buildah and podman with a storage, settings and a network of their own."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._store = [f"--root={folder}/storage", f"--runroot={folder}/run"]
        # Of podman's network backends the one whose networks know containers by name.
        (folder / "containers.conf").write_text('[network]\nnetwork_backend = "netavark"\n')
        self._environment = {
            **os.environ,
            "CONTAINERS_CONF": str(folder / "containers.conf"),
            "BUILDAH_ISOLATION": "chroot",
        }
        overlay = subprocess.run(
            ["buildah", *self._store, "--storage-driver=overlay", "info"], env=self._environment, capture_output=True
        )
        self.shares_layers = overlay.returncode == 0
        self._store.append(f"--storage-driver={'overlay' if self.shares_layers else 'vfs'}")

    def buildah(self, *arguments: str, check: bool = True) -> Done:
        return self._run(["buildah", *self._store, *arguments], check)

    def podman(self, *arguments: str, check: bool = True) -> Done:
        engine = ["--runtime=runc", "--cgroup-manager=cgroupfs", "--events-backend=file"]
        networks = f"--network-config-dir={self.folder}/networks"
        return self._run(["podman", *self._store, *engine, networks, *arguments], check)

    def podman_run(self, *arguments: str, check: bool = True) -> Done:
        return self.podman("run", *LIMITS, *arguments, check=check)

    def _run(self, command: Sequence[str], check: bool) -> Done:
        done = subprocess.run(command, env=self._environment, text=True, capture_output=True)
        if check and done.returncode:
            fail(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        return done

    def remove(self) -> None:
        """All containers, the network, the images."""
        for leftover in (["rm", "--all", "--force", "--time=0"], ["network", "rm", "--force", "tandem"]):
            self.podman(*leftover, check=False)
        self.buildah("rm", "--all", check=False)
        for mounted in (self.folder / "storage/overlay", self.folder / "storage"):
            subprocess.run(["umount", mounted], capture_output=True)
        shutil.rmtree(self.folder)


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools.images", description=__doc__)
    parser.add_argument(
        "--base-image", default="", help=f"unset: {PULLED_BASE}, or Debian's packages if it cannot be had"
    )
    parser.add_argument("--torch-index-url", default="", help="where pip takes torch from; unset: as pip is configured")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/images", help="for the storage; is removed")
    options = parser.parse_args()
    if os.geteuid():
        fail("must be root: layers hold files of several users, and containers get a network")
    install_packages()
    rendered = subprocess.run(
        [Path(sys.executable).parent / "kubectl", "kustomize", OVERLAY], check=True, capture_output=True, text=True
    )
    objects = list(yaml.safe_load_all(rendered.stdout))
    folder = options.folder.resolve()
    if folder.exists():
        Engine(folder).remove()  # Of a run that was killed.
    engine = Engine(folder)
    try:
        claims = {"tandem-models": ROOT / "models"}
        containers = pod_containers(objects, folder / "configs", claims)
        base = options.base_image or find_base(engine)
        with timed(f"built both images on {base}"):
            build(engine, {c.image for c in containers}, base, options.torch_index_url)
        check_images(engine, containers)
        run_stack(engine, containers)
    finally:
        engine.remove()


def install_packages() -> None:
    missing = [p for file, p in PACKAGES.items() if not (Path(file).exists() if file[0] == "/" else shutil.which(file))]
    if not missing:
        return
    if not shutil.which("apt-get"):
        fail(f"needs {', '.join(missing)}, and there is no apt-get to install them")
    say(f"installing {', '.join(missing)}")
    for command in (["update", "-qq"], ["install", "-qq", "--yes", "--no-install-recommends", *missing]):
        subprocess.run(["apt-get", *command], check=True, stdout=subprocess.DEVNULL)


def find_base(engine: Engine) -> str:
    """The published base, or one of this Debian's own packages where no registry answers."""
    if engine.buildah("pull", "--quiet", PULLED_BASE, check=False).returncode == 0:
        return PULLED_BASE
    say(f"{PULLED_BASE} cannot be pulled; making a base of Debian's packages")
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    archive = engine.folder / "base.tar"
    packages = "--include=ca-certificates,python3,python3-venv"
    with timed("made it"):
        bootstrap = ["mmdebstrap", "--quiet", "--variant=minbase", packages, release["VERSION_CODENAME"], archive]
        subprocess.run(bootstrap, check=True)
        (engine.folder / "Containerfile").write_text(f"FROM scratch\nADD {archive.name} /\n")
        engine.buildah("build", "--quiet", f"--tag={LOCAL_BASE}", str(engine.folder))
        archive.unlink()
    return LOCAL_BASE


def build(engine: Engine, images: set[str], base: str, torch_index_url: str) -> None:
    """Each image by the target that its name says."""
    secret, volumes = pip_settings(engine.folder)
    for image in sorted(images):
        target = image.rpartition("/")[2].partition(":")[0].removeprefix("tandem-")
        engine.buildah(
            "build",
            "--quiet",
            f"--layers={str(engine.shares_layers).lower()}",
            f"--target={target}",
            f"--build-arg=BASE_IMAGE={base}",
            f"--build-arg=TORCH_INDEX_URL={torch_index_url}",
            f"--secret=id=pip,src={secret}",
            *(f"--volume={path}:{path}:ro" for path in volumes),
            f"--tag={image}",
            str(ROOT),
        )


def check_images(engine: Engine, containers: list[PodContainer]) -> None:
    """Of themselves, whatever a manifest says: a user by number, the gateway without torch."""
    for image in sorted({c.image for c in containers}):
        user, size = engine.podman("inspect", "--format={{.User}} {{.Size}}", image).stdout.split()
        if user != "10001:10001":
            fail(f"{image}: its user is {user}")
        say(f"{image}: {int(size) / 1e6:.0f} MB")
    gateway = next(c for c in containers if c.name == "gateway-0")
    torch = ["--network=none", "--entrypoint=python", gateway.image, "-c", "import torch"]
    said = engine.podman_run("--rm", *torch, check=False).stderr
    if "No module named 'torch'" not in said:
        fail(f"the gateway's image has torch, or cannot run: {said}")


def run_stack(engine: Engine, containers: list[PodContainer]) -> None:
    engine.podman("network", "create", "--internal", "tandem")
    for c in containers:
        names = [f"--network-alias={host}" for host in c.hosts]
        where = [f"--name={c.name}", "--pull=never", "--network=tandem", *names]
        engine.podman_run("--detach", *where, *c.options, c.image, *c.command)
    try:
        with timed("all containers are ready"):
            for c in containers:
                until_ready(engine, c)
        for c in containers:
            check_confinement(engine, c)
        for mode in ("off", "tree"):
            ask(engine, mode)
        for c in containers:
            stop(engine, c)
    except BaseException:
        for c in containers:
            log = engine.podman("logs", "--tail=30", c.name, check=False)
            print(f"--- {c.name}\n{log.stdout}{log.stderr}", file=sys.stderr)
        raise


def until_ready(engine: Engine, container: PodContainer) -> None:
    """Its readiness probe's question, asked from inside."""
    port, service = container.readiness
    asking = f"asyncio.run(check_health('127.0.0.1:{port}', {service!r}))"
    code = f"import asyncio; from tandem.rpc import check_health; print({asking})"
    deadline = time.monotonic() + READY_SECONDS
    while True:
        asked = engine.podman("exec", container.name, "python", "-c", code, check=False)
        if asked.stdout.strip() == "SERVING":
            return
        if time.monotonic() > deadline:
            fail(f"{container.name}: is not ready after {READY_SECONDS} s: {asked.stdout}{asked.stderr}")
        time.sleep(1)


def check_confinement(engine: Engine, container: PodContainer) -> None:
    """As it runs: who it is, and that it cannot write where it should not."""
    who = engine.podman("exec", container.name, "id", "-u").stdout.strip()
    write = engine.podman("exec", container.name, "touch", "/opt/code/x", check=False)
    if who != "10001" or "Read-only file system" not in write.stderr:
        fail(f"{container.name}: runs as {who}, writing said {write.stderr!r}")


def ask(engine: Engine, mode: str) -> None:
    question = ["tandem.cli.main", "generate", QUESTION, "--address=gateway:7600", "--temperature=0", "--max-tokens=40"]
    answer = engine.podman(*("exec", "gateway-0", "python", "-m", *question, "--stats", f"--speculation-mode={mode}"))
    say(f"speculation {mode}: {' '.join(answer.stdout.split())}")
    say(" ".join(answer.stderr.split()))
    drafted = "acceptance length" in answer.stderr
    if ANSWER not in answer.stdout or drafted != (mode != "off"):
        fail(f"{answer.stdout!r} is not the answer, or drafts had no part in it")


def stop(engine: Engine, container: PodContainer) -> None:
    """SIGTERM ends it in order: its program is the container's first process, and handles it."""
    engine.podman("stop", container.name)
    code = engine.podman("inspect", "--format={{.State.ExitCode}}", container.name).stdout.strip()
    if code != "0":
        fail(f"{container.name}: ended with {code}")


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    say(f"{what} in {time.monotonic() - started:.0f} s")


def say(line: str) -> None:
    print(f"images: {line}", flush=True)


def fail(why: str) -> NoReturn:
    sys.exit(f"images: {why}")


if __name__ == "__main__":
    main()
