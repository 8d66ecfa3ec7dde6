"""The one YAML file that configures a stack. Every service reads the same file and uses its own section.

Paths are relative to the file. Unknown keys, wrong types and missing folders are start-up errors that name the key.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from tandem.errors import StartupError


def _address(value: str) -> str:
    host, colon, port = value.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 <= int(port) <= 65535:
        raise ValueError(f"must be HOST:PORT, is {value!r}")
    return value


def _folder(value: str | Path, info: ValidationInfo) -> Path:
    path = _path(value, info)
    if not (path / "config.json").is_file():
        raise ValueError(f"no config.json in {path}")
    return path


def _yaml_off(value: object) -> object:
    """YAML reads a bare `off` as false."""
    return "off" if value is False else value


def _yaml_switch(value: object) -> object:
    """The same for `on`."""
    return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


def _file(value: str | Path, info: ValidationInfo) -> Path:
    path = _path(value, info)
    if not path.is_file():
        raise ValueError(f"no file {path}")
    return path


def _new_file(value: str | Path, info: ValidationInfo) -> Path:
    path = _path(value, info)
    if not path.parent.is_dir():
        raise ValueError(f"no folder {path.parent}")
    return path


def _path(value: str | Path, info: ValidationInfo) -> Path:
    return _path_as_written(value, info).resolve()


def _path_as_written(value: str | Path, info: ValidationInfo) -> Path:
    """Links are not followed: they may lead elsewhere later, as those of a mounted Secret do."""
    base = (info.context or {}).get("base", Path())
    return (base / Path(value).expanduser()).absolute()


Address = Annotated[str, AfterValidator(_address)]
ModelFolder = Annotated[Path, AfterValidator(_folder)]
InputFile = Annotated[Path, AfterValidator(_file)]
OutputFile = Annotated[Path, AfterValidator(_new_file)]
OutputFolder = Annotated[Path, AfterValidator(_path)]
ReplaceableFile = Annotated[Path, AfterValidator(_path_as_written)]
"""Read when it is needed, and again when it has been replaced."""
Config = TypeVar("Config", bound=BaseModel)
Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["bfloat16", "float32"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _ServiceSection(_Section):
    metrics_listen: Address | None = None
    """Where Prometheus scrapes over HTTP; unset serves no metrics."""
    reflection: bool = False
    """Serve gRPC reflection, for grpcurl and the like."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    shutdown_grace_seconds: float = Field(default=10.0, ge=0)
    """How long calls in flight may take after SIGTERM."""


class ServerTlsConfig(_Section):
    """A `tls:` section: PEM files of a server."""

    certificate: ReplaceableFile
    """Its certificate, and those between it and the authority's."""
    key: ReplaceableFile
    client_ca: ReplaceableFile | None = None
    """Clients must have a certificate that these authorities signed; unset asks them for none."""


class ClientTlsConfig(_Section):
    """A `verifier_tls:` section: PEM files of a client of the verifier, to call it by TLS."""

    ca: ReplaceableFile
    """Authorities whose certificates are trusted. The verifier's must be for the host that is dialled."""
    certificate: ReplaceableFile | None = None
    """To show to the verifier."""
    key: ReplaceableFile | None = None

    @model_validator(mode="after")
    def _certificate_has_its_key(self) -> "ClientTlsConfig":
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key must both be set, or neither")
        return self


class _TlsServerSection(_Section):
    tls: ServerTlsConfig | None = None
    """Serve by TLS; unset serves plain text."""
    health_listen: Address | None = None
    """Health alone, in plain text, at a port of its own, for probes: those of Kubernetes speak no TLS."""

    @model_validator(mode="after")
    def _tls_leaves_health_to_probes(self) -> "_TlsServerSection":
        if self.tls and not self.health_listen:
            raise ValueError("tls needs health_listen: probes, and `tandem`, ask for health without TLS")
        return self


class _ComputeSection(_ServiceSection):
    device: Device = "auto"
    """auto is cuda where there is one."""
    dtype: Dtype = "bfloat16"
    """Of weights, KV and features."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads for torch; unset takes all cores. Of a target over several ranks: of each; unset shares the cores."""
    omp_spin_count: int = Field(default=20000, ge=0)
    """GOMP_SPINCOUNT: how long idle OpenMP threads spin. Libgomp's own default starves processes that share cores;
    measured in docs/architecture.md."""


class GatewayConfig(_ServiceSection, _TlsServerSection):
    """The `gateway:` section."""

    listen: Address = "127.0.0.1:7600"
    verifier: Address = "127.0.0.1:7601"
    """Where the verifier serves."""
    verifier_tls: ClientTlsConfig | None = None
    """Call it by TLS."""
    max_concurrent_requests: int = Field(default=256, ge=1)
    """Generations at once; one more is RESOURCE_EXHAUSTED."""
    max_tokens_default: int | None = Field(default=None, ge=1)
    """max_tokens of a request that sets none; unset is what the context holds."""
    max_request_bytes: int = Field(default=16 * 2**20, ge=1024)
    """Larger requests are RESOURCE_EXHAUSTED before they are read."""
    max_sessions: int = Field(default=1024, ge=1)
    """Sessions kept; one more is RESOURCE_EXHAUSTED."""
    session_ttl_seconds: int = Field(default=3600, ge=1)
    """Default time without use after which a session is forgotten."""


class ParallelConfig(_Section):
    """The `verifier.parallel:` section: how the target is split over processes (ranks)."""

    ep: int = Field(default=1, ge=1)
    """Ranks in all. Experts of a mixture are split over them."""
    tp: int = Field(default=1, ge=1)
    """Ranks that attention, dense layers and the head are split over: 1 (each has all of them) or as many as ep."""
    experts: Literal["whole", "cut"] = "whole"
    """whole: a rank has some experts. cut: every rank has a part of every expert."""
    placement: InputFile | None = None
    """Which rank has which experts, as `tandem experts plan` writes it; unset is in order of ids."""
    expert_loads: OutputFile | None = None
    """Where to write how many tokens each expert got, every minute and at the end, for `tandem experts plan`."""

    @model_validator(mode="after")
    def _tp_is_one_or_all(self) -> "ParallelConfig":
        if self.tp not in (1, self.ep):
            raise ValueError(f"tp must be 1 or ep, which is {self.ep}; is {self.tp}")
        return self

    @model_validator(mode="after")
    def _cut_experts_have_no_place(self) -> "ParallelConfig":
        if self.placement and self.experts == "cut":
            raise ValueError("placement does not apply to experts: cut, every rank has a part of each")
        return self


class DraftGraphsConfig(_Section):
    """The `drafter.graphs:` section: steps of fixed shape, captured at start and replayed."""

    mode: Annotated[Literal["auto", "off", "on"], BeforeValidator(_yaml_switch)] = "auto"
    """auto: on a GPU. on: elsewhere too, where the same steps run uncaptured. off: steps have the shapes they need."""
    eager_fallback: bool = True
    """Run what cannot be captured without; false makes that a start-up error."""

    def fixed_shapes(self, device_type: str) -> bool:
        """Whether steps have fixed shapes on a device of this type, "cpu" or "cuda"."""
        return self.mode == "on" or (self.mode == "auto" and device_type == "cuda")


class GraphsConfig(DraftGraphsConfig):
    """The `verifier.graphs:` section."""

    max_rows: int = Field(default=512, ge=1)
    """Rows of the largest step captured. Larger ones, such as long prompt chunks, run eagerly."""


class VerifierConfig(_ComputeSection, _TlsServerSection):
    """The `verifier:` section."""

    listen: Address = "127.0.0.1:7601"
    name: str = "verifier"
    """For logs and drafters."""
    parallel: ParallelConfig = ParallelConfig()
    graphs: GraphsConfig = GraphsConfig()
    cpu_kernels: Literal["auto", "native", "torch"] = "auto"
    """On a CPU: native runs a dense target in bf16 or 4 bits in C++ that is compiled here, auto does where that is
    possible, torch never."""
    speculation_mode: Annotated[Literal["off", "block", "tree", "auto"], BeforeValidator(_yaml_off)] = "auto"
    """What requests that name no mode get. auto: each step what pays most at that moment."""
    max_draft_nodes: int = Field(default=32, ge=1, le=256)
    """Draft tokens a step verifies per sequence at most."""
    warm_up_seconds: float = Field(default=2.0, ge=0)
    """About how long steps are measured at start, for mode auto."""
    max_context: int | None = Field(default=None, ge=2)
    """Tokens a sequence may hold; unset is the target's max_position_embeddings."""
    kv_block_tokens: int = Field(default=32, ge=1)
    """Tokens per KV block."""
    kv_blocks: int = Field(default=1024, ge=2)
    """KV blocks in all."""
    max_running_sequences: int = Field(default=32, ge=1)
    """Sequences that step together at most."""
    max_waiting_sequences: int = Field(default=256, ge=0)
    """Sequences queued beyond those; one more is RESOURCE_EXHAUSTED."""
    max_prefill_rows: int = Field(default=256, ge=1)
    """Prompt tokens of one step at most: a longer prompt is prefilled in chunks, so that others keep streaming."""
    draft_timeout_ms: float = Field(default=200.0, gt=0)
    """A draft later than this is not waited for: the sequence takes a plain step."""
    show_last_draft: bool = False
    """Tell the tokens of the draft verified last, of any request, to who asks for live figures: the dashboard does."""
    overlap_drafting: bool = True
    """Verify some sequences while others are drafted for. False where drafter and verifier share the same cores: a step
    then waits for all drafts, and the two never run at once."""


class DrafterConfig(_ComputeSection):
    """The `drafter:` section."""

    listen: Address = "127.0.0.1:7602"
    """Where health (and reflection) is served; work arrives on the stream the drafter dials."""
    verifier: Address = "127.0.0.1:7601"
    """The verifier to dial."""
    verifier_tls: ClientTlsConfig | None = None
    """Dial it by TLS."""
    name: str = "drafter"
    """For logs and metrics."""
    reconnect_max_seconds: float = Field(default=5.0, gt=0)
    """Longest pause between attempts to reach the verifier."""
    quantization: Literal["none", "int8"] = "none"
    """int8: the draft model multiplies in 8-bit integers, on CPUs several times faster; a little less is accepted."""
    cpu_kernels: Literal["auto", "native", "torch"] = "auto"
    """On a CPU: native runs a DFlash draft model in bf16 or int8 in C++ that is compiled here, auto does where that is
    possible, torch never."""
    graphs: DraftGraphsConfig = DraftGraphsConfig()
    kv_block_tokens: int = Field(default=32, ge=1)
    """Tokens per block of the draft model's context, with graphs."""
    kv_blocks: int = Field(default=1024, ge=2)
    """Such blocks in all. Where they do not hold all sequences some go without drafts."""
    draft_source: Literal["dflash", "ngram"] = "dflash"
    """What drafts come from: draft_model, or the sequence's own text, which needs no model and no torch."""
    ngram_max: int = Field(default=8, ge=1, le=64)
    """Tokens of the longest suffix of the text that is looked up in it, for ngram."""
    ngram_min: int = Field(default=2, ge=1, le=64)
    """Tokens of the shortest, for ngram. 1 drafts more often and is wrong more often."""
    ngram_block_size: int = Field(default=16, ge=2)
    """Tokens of a block at most, the anchor included, for ngram."""


_DFLASH_KEYS = (
    "device",
    "dtype",
    "threads",
    "omp_spin_count",
    "quantization",
    "cpu_kernels",
    "graphs",
    "kv_block_tokens",
    "kv_blocks",
)
_NGRAM_KEYS = ("ngram_max", "ngram_min", "ngram_block_size")


def _endpoint(value: str) -> str:
    scheme, separator, address = value.partition("://")
    if not separator or scheme not in ("http", "https"):
        raise ValueError(f"must be http://HOST:PORT or https://HOST:PORT, is {value!r}")
    return f"{scheme}://{_address(address.rstrip('/'))}"


class TracingConfig(_Section):
    """The `tracing:` section: OpenTelemetry spans of all services."""

    endpoint: Annotated[str, AfterValidator(_endpoint)]
    """An OTLP collector's gRPC port. https is called by TLS, with the system's authorities."""
    sample_rate: float = Field(default=0.05, ge=0, le=1)
    """Share of the requests that are traced, of those that do not come with a trace context, which then decides."""
    verify_step_sample_rate: float = Field(default=0.1, ge=0, le=1)
    """Share of a traced request's decode steps that are recorded, each with the draft it verifies."""


class StackConfig(_Section):
    """A whole file."""

    target: ModelFolder
    """The target: a Hugging Face folder (config.json, safetensors, tokenizer.json)."""
    draft_model: ModelFolder | None = None
    """The draft model: a DFlash folder. Unset: plain decoding only, unless the drafter's draft_source is ngram."""
    tracing: TracingConfig | None = None
    """Unset traces nothing."""
    gateway: GatewayConfig = GatewayConfig()
    verifier: VerifierConfig = VerifierConfig()
    drafter: DrafterConfig = DrafterConfig()

    @property
    def speculates(self) -> bool:
        """Whether there is anything to draft with."""
        return self.draft_model is not None or self.drafter.draft_source == "ngram"

    @model_validator(mode="after")
    def _speculation_needs_drafts(self) -> "StackConfig":
        asked = "speculation_mode" in self.verifier.model_fields_set and self.verifier.speculation_mode != "off"
        if asked and not self.speculates:
            raise ValueError(
                f"verifier.speculation_mode {self.verifier.speculation_mode!r} needs draft_model "
                "or drafter.draft_source ngram"
            )
        return self

    @model_validator(mode="after")
    def _drafter_keys_fit_its_source(self) -> "StackConfig":
        drafter = self.drafter
        wrong = _DFLASH_KEYS if drafter.draft_source == "ngram" else _NGRAM_KEYS
        for key in wrong:
            if key in drafter.model_fields_set:
                raise ValueError(f"drafter.{key}: does not apply to draft_source {drafter.draft_source}")
        if drafter.ngram_min > drafter.ngram_max:
            raise ValueError(
                f"drafter.ngram_min: must be at most ngram_max {drafter.ngram_max}, is {drafter.ngram_min}"
            )
        return self


def load_config(path: str | Path, *more: str | Path) -> StackConfig:
    """Read and check a config file; StartupError with one line per wrong key.

    `more` are files whose keys are added to it, or replace its own, at any depth. Paths are relative to the first."""
    return read_config(Path(path), StackConfig, *map(Path, more))


def with_ranks(config: StackConfig, ep: int | None, tp: int | None) -> StackConfig:
    """The config with these in place of verifier.parallel's, where given. StartupError if they do not fit."""
    verifier = config.verifier
    changes = {key: value for key, value in (("ep", ep), ("tp", tp)) if value is not None}
    try:
        parallel = ParallelConfig.model_validate({**verifier.parallel.model_dump(), **changes})
    except ValidationError as error:
        raise _refused("--ep, --tp", error) from None
    return config.model_copy(update={"verifier": verifier.model_copy(update={"parallel": parallel})})


def read_config(path: Path, kind: type[Config], *more: Path) -> Config:
    """A YAML file, with the keys of `more`, as `kind`; paths in them are relative to the first. StartupError with one
    line per wrong key."""
    data: dict[str, Any] = {}
    for file in (path, *more):
        data = _merged(data, _read_mapping(file))
    try:
        return kind.model_validate(data, context={"base": path.parent})
    except ValidationError as error:
        raise _refused(f"config {' + '.join(map(str, (path, *more)))}", error) from None


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise StartupError(f"config {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise StartupError(f"config {path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise StartupError(f"config {path}: must be a mapping with at least the key 'target'")
    return data


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    both = {key for key in below.keys() & above.keys() if isinstance(below[key], dict) and isinstance(above[key], dict)}
    return {**below, **above, **{key: _merged(below[key], above[key]) for key in both}}


def _refused(where: str, error: ValidationError) -> StartupError:
    lines = (_describe(e) for e in error.errors(include_url=False))
    return StartupError("\n".join(f"{where}: {line}" for line in lines))


def _describe(error: Any) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{key}: unknown key"
    return f"{key}: {error['msg']}" if key else str(error["msg"])
