"""config.json to TargetConfig, per architecture. Keys a file lacks have the default of transformers' class."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tandem.checkpoints.folder import CheckpointFolder
from tandem.errors import StartupError
from tandem.kernels.route import Routing
from tandem.layers.rope import RopeConfig
from verifier_service.models.target_config import (
    PROJECTIONS,
    ExpertNames,
    GroupedAttention,
    LatentAttention,
    Mixture,
    TargetConfig,
)

_MIXTRAL = ExpertNames("block_sparse_moe", "w1", "w3", "w2")
_WRAPPER = "KimiK25ForConditionalGeneration"


def read_config(folder: CheckpointFolder) -> TargetConfig:
    """The target a folder holds; of a multimodal model its language part. StartupError names file, key and value."""
    where = folder.path / "config.json"
    found = folder.config.get("architectures")
    if found == [_WRAPPER]:
        if "text_config" not in folder.config:
            raise StartupError(f"{where}: text_config: missing")
        found = folder.text_config.get("architectures", ["DeepseekV3ForCausalLM"])
        keys = _Keys(folder.text_config, where, "text_config.")
    else:
        keys = _Keys(folder.config, where)
    if not isinstance(found, list) or len(found) != 1 or found[0] not in _ARCHITECTURES:
        supported = ", ".join((*_ARCHITECTURES, _WRAPPER))
        raise StartupError(f"{where}: architectures: {found} is not supported; supported: {supported}")
    return _ARCHITECTURES[found[0]](keys)


class _Keys:
    """Values of a config.json; every failure is a StartupError that names file and key."""

    def __init__(self, values: dict[str, Any], where: Path, path: str = ""):
        self._values = values
        self._where = where
        self._path = path

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str, default: Any) -> Any:
        """null counts as absent."""
        value = self._values.get(key)
        return default if value is None else value

    def size(self, key: str, default: int | None = None) -> int:
        """An integer of at least 1."""
        value = self.get(key, default)
        if value is None:
            raise StartupError(f"{self._where}: {self._path}{key}: missing")
        if not isinstance(value, int) or value < 1:
            raise self.error(key, value, "a whole number of at least 1")
        return value

    def only(self, key: str, supported: Any) -> None:
        """Refuse a key that is there with another value."""
        value = self.get(key, supported)
        if value != supported:
            raise self.error(key, value, repr(supported))

    def error(self, key: str, value: Any, supported: str) -> StartupError:
        return StartupError(f"{self._where}: {self._path}{key}: {value!r} is not supported; supported: {supported}")

    def rope(self, theta: float) -> RopeConfig:
        """theta: the class default."""
        try:
            return RopeConfig.from_config({"rope_theta": theta, **self._values})
        except ValueError as error:
            raise StartupError(f"{self._where}: {self._path}{error}") from None


def _target(
    keys: _Keys,
    attention: GroupedAttention | LatentAttention,
    rope: RopeConfig,
    mixture: Mixture | None = None,
    eps: float = 1e-6,
    extra_layers: int = 0,
) -> TargetConfig:
    """eps: the class default."""
    keys.only("hidden_act", "silu")
    keys.only("attention_bias", False)
    return TargetConfig(
        vocab_size=keys.size("vocab_size"),
        hidden_size=keys.size("hidden_size"),
        intermediate_size=keys.size("intermediate_size"),
        layers=keys.size("num_hidden_layers"),
        heads=keys.size("num_attention_heads"),
        attention=attention,
        mixture=mixture,
        eps=keys.get("rms_norm_eps", eps),
        rope=rope,
        tied_head=keys.get("tie_word_embeddings", False),
        max_positions=keys.size("max_position_embeddings"),
        extra_layers=extra_layers,
    )


def _grouped(keys: _Keys, kv_heads: int | None, head_dim: int | None, qk_norm: bool) -> GroupedAttention:
    """kv_heads, head_dim: class defaults; None: one key per query head, hidden_size / heads."""
    heads = keys.size("num_attention_heads")
    kv_heads = keys.size("num_key_value_heads", kv_heads or heads)
    if heads % kv_heads:
        raise keys.error("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads, {heads}")
    return GroupedAttention(
        kv_heads=kv_heads,
        head_dim=keys.size("head_dim", head_dim or keys.size("hidden_size") // heads),
        qk_norm=qk_norm,
    )


def _mixture(
    keys: _Keys,
    layers: set[int],
    experts: int,
    experts_per_token: int,
    expert_size: int,
    routing: Routing,
    shared_size: int = 0,
    names: ExpertNames = PROJECTIONS,
) -> Mixture:
    if experts_per_token > experts:
        raise keys.error("num_experts_per_tok", experts_per_token, f"at most the {experts} experts")
    if experts % routing.groups:
        raise keys.error("n_group", routing.groups, f"a divisor of the {experts} experts")
    candidates = experts // routing.groups * routing.kept_groups
    if routing.kept_groups > routing.groups or experts_per_token > candidates:
        supported = f"at most n_group, {routing.groups}, and enough for {experts_per_token} experts"
        raise keys.error("topk_group", routing.kept_groups, supported)
    return Mixture(frozenset(layers), experts, experts_per_token, expert_size, shared_size, routing, names)


def _llama(keys: _Keys) -> TargetConfig:
    keys.only("mlp_bias", False)
    return _target(keys, _grouped(keys, None, None, qk_norm=False), keys.rope(1e4))


def _qwen3(keys: _Keys) -> TargetConfig:
    _refuse_windows(keys)
    return _target(keys, _grouped(keys, 32, 128, qk_norm=True), keys.rope(1e4))


def _qwen3_moe(keys: _Keys) -> TargetConfig:
    _refuse_windows(keys)
    step = keys.size("decoder_sparse_step", 1)
    dense = keys.get("mlp_only_layers", [])
    layers = {i for i in range(keys.size("num_hidden_layers")) if i not in dense and (i + 1) % step == 0}
    mixture = _mixture(
        keys,
        layers,
        experts=keys.size("num_experts", keys.get("num_local_experts", 128)),
        experts_per_token=keys.size("num_experts_per_tok", 8),
        expert_size=keys.size("moe_intermediate_size", 768),
        routing=Routing(sigmoid=False, groups=1, kept_groups=1, normalise=keys.get("norm_topk_prob", False), scale=1.0),
    )
    return _target(keys, _grouped(keys, 4, None, qk_norm=True), keys.rope(1e4), mixture)


def _mixtral(keys: _Keys) -> TargetConfig:
    keys.only("sliding_window", None)
    mixture = _mixture(
        keys,
        set(range(keys.size("num_hidden_layers"))),
        experts=keys.size("num_local_experts", 8),
        experts_per_token=keys.size("num_experts_per_tok", 2),
        expert_size=keys.size("intermediate_size"),
        routing=Routing(sigmoid=False, groups=1, kept_groups=1, normalise=True, scale=1.0),
        names=_MIXTRAL,
    )
    return _target(keys, _grouped(keys, 8, None, qk_norm=False), keys.rope(1e6), mixture, eps=1e-5)


def _deepseek_v3(keys: _Keys) -> TargetConfig:
    for key, supported in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
        keys.only(key, supported)
    first = keys.get("first_k_dense_replace", 3)
    expert_size = keys.size("moe_intermediate_size", 2048)
    mixture = _mixture(
        keys,
        set(range(first, keys.size("num_hidden_layers"))),
        experts=keys.size("n_routed_experts", 256),
        experts_per_token=keys.size("num_experts_per_tok", 8),
        expert_size=expert_size,
        routing=Routing(
            sigmoid=True,
            groups=keys.size("n_group", 8),
            kept_groups=keys.size("topk_group", 4),
            normalise=keys.get("norm_topk_prob", True),
            scale=keys.get("routed_scaling_factor", 2.5),
        ),
        shared_size=expert_size * keys.get("n_shared_experts", 1),
    )
    rope = keys.rope(1e4)
    nope_dim, rope_dim = keys.size("qk_nope_head_dim", 128), keys.size("qk_rope_head_dim", 64)
    attention = LatentAttention(
        q_rank=keys.get("q_lora_rank", None) if "q_lora_rank" in keys else 1536,
        kv_rank=keys.size("kv_lora_rank", 512),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=keys.size("v_head_dim", 128),
        interleaved_rope=keys.get("rope_interleave", True),
        scale=(nope_dim + rope_dim) ** -0.5 * rope.softmax_factor,
    )
    extra = keys.get("num_nextn_predict_layers", keys.get("num_mtp_layers", 1))
    return _target(keys, attention, rope, mixture, extra_layers=extra)


def _refuse_windows(keys: _Keys) -> None:
    keys.only("use_sliding_window", False)
    for kind in keys.get("layer_types", []):
        if kind != "full_attention":
            raise keys.error("layer_types", kind, "'full_attention'")


_ARCHITECTURES: dict[str, Callable[[_Keys], TargetConfig]] = {
    "LlamaForCausalLM": _llama,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "MixtralForCausalLM": _mixtral,
    "DeepseekV3ForCausalLM": _deepseek_v3,
}
