"""config.json of a DFlash or DFlash2 draft model, as published: which network it is, what it needs of its target.

Sources: the Qwen3 configuration it extends, and the DFlash reference code (PyPI `dflash` 0.1.0) for `dflash_config`,
the default taps and the causal rule. Anything this code does not know how to honour is refused by name: a draft
model that is run differently from how it was trained drafts badly and says nothing.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.checkpoints.model_json import read_json
from tandem.errors import StartupError
from tandem.layers.rope import RopeConfig

_DRAFT_KEYS = frozenset(
    {
        "block_size",
        "input_embedding_scale",
        "final_logit_softcapping",
        "mask_token_id",
        "num_target_layers",
        "output_multiplier",
        "target_layer_ids",
    }
)
"""May stand at the top level or inside dflash_config, which wins."""

_DFLASH2_KEYS = frozenset({"conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"})
"""Those of DFlash2, in the same places."""

_USED_KEYS = frozenset(
    {
        "architectures",
        "attention_bias",
        "dflash_config",
        "draft_vocab_size",
        "head_dim",
        "hidden_act",
        "hidden_size",
        "intermediate_size",
        "is_causal",
        "layer_types",
        "max_position_embeddings",
        "max_window_layers",
        "model_type",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "sliding_window",
        "use_sliding_window",
        "vocab_size",
    }
)

_HARMLESS_KEYS = frozenset(
    {
        "_name_or_path",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "initializer_range",
        "pad_token_id",
        "tie_word_embeddings",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Do not change what the network computes. Weights are converted to the configured dtype; dropout is for training;
embeddings and head are always the target's."""

_VARIANTS = {
    **dict.fromkeys(_DFLASH2_KEYS, "of a DFlash2 draft model, which architectures must name"),
    "sample_from_anchor": "of a DSpark draft model (its slots are shifted by one), which is not supported",
    "shift_label": "of a draft model with shifted labels, which is not supported",
    "projector_type": "of a Domino draft model, which is not supported",
    "gru_hidden_dim": "of a Domino draft model, which is not supported",
}

_QWEN3_MAX_WINDOW_LAYERS = 28
"""What Qwen3's configuration means by an absent max_window_layers."""


@dataclass(frozen=True)
class DraftLayer:
    """How one layer's attention sees: which block slots and how much context."""

    causal: bool
    """Block slots see only slots at or before their own position; otherwise all slots, both directions."""
    window: int | None
    """Positions a query sees at most, its own included; on layers that are not causal also ahead. None sees all."""


@dataclass(frozen=True)
class DFlash2Config:
    """What DFlash2 adds. Fields are named as their keys."""

    conv_kernel_size: int
    """Taps of each convolution: how many slots it reads, its own included."""
    conv_group_size: int
    """Channels that share a dynamic kernel; divides hidden_size."""
    selector_rank: int
    selector_top_k: int
    """Candidates per slot."""


@dataclass(frozen=True)
class DraftConfig:
    """A draft model. Widths are in values, positions and windows in tokens.

    Fields are named as their keys, except `rope` (rope_theta and rope_scaling, or rope_parameters), `layers`
    (layer_types, use_sliding_window, sliding_window, max_window_layers, is_causal) and `dflash2` (the keys of
    DFlash2Config). The keys architectures, model_type "qwen3" and hidden_act "silu" say what is not a choice.
    """

    block_size: int
    """Tokens of a block, the anchor included."""
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    """The taps: 0-based target layers whose outputs feed `fc`, in its order."""
    num_target_layers: int | None
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    layers: tuple[DraftLayer, ...]
    attention_bias: bool
    vocab_size: int
    draft_vocab_size: int | None
    """Tokens the draft model proposes among, listed by the folder's tensor `d2t`; None is the whole vocabulary."""
    max_position_embeddings: int
    input_embedding_scale: float
    """Multiplies the target's raw embedding rows."""
    output_multiplier: float
    """Multiplies the logits."""
    final_logit_softcapping: float | None
    """c: logits become c * tanh(logits / c), after output_multiplier."""
    dflash2: DFlash2Config | None
    """None for DFlash (v1): architectures ["DFlashDraftModel"], not ["DFlash2DraftModel"]."""

    @classmethod
    def load(cls, folder: Path) -> "DraftConfig":
        """Reads `folder`/config.json; StartupError names the file and the key."""
        return _Reader(folder / "config.json").read()


class _Reader:
    def __init__(self, file: Path):
        self._file = file
        self._top = read_json(file)
        inner = self._top.get("dflash_config") or {}
        if not isinstance(inner, dict):
            raise self._wrong("dflash_config", "must be an object")
        self._inner: dict[str, Any] = inner

    def read(self) -> DraftConfig:
        dflash2 = self._is_dflash2()
        self._refuse_unknown_keys(_DRAFT_KEYS | _DFLASH2_KEYS if dflash2 else _DRAFT_KEYS)
        layers = self._int("num_hidden_layers")
        heads, kv_heads = self._int("num_attention_heads"), self._int("num_key_value_heads")
        if heads % kv_heads:
            raise self._wrong("num_key_value_heads", f"must divide num_attention_heads {heads}, is {kv_heads}")
        vocab_size = self._int("vocab_size")
        mask_token_id = self._int("mask_token_id", minimum=0)
        if mask_token_id >= vocab_size:
            raise self._wrong("mask_token_id", f"must be below vocab_size {vocab_size}, is {mask_token_id}")
        num_target_layers = None if self._get("num_target_layers") is None else self._int("num_target_layers")
        softcapping = self._float("final_logit_softcapping", 0.0)
        return DraftConfig(
            block_size=self._int("block_size", minimum=2),
            mask_token_id=mask_token_id,
            target_layer_ids=self._target_layer_ids(num_target_layers, layers),
            num_target_layers=num_target_layers,
            hidden_size=self._int("hidden_size"),
            intermediate_size=self._int("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=self._int("head_dim", multiple_of=2),
            rms_norm_eps=self._float("rms_norm_eps", None),
            rope=self._rope(),
            layers=self._layers(layers),
            attention_bias=bool(self._bool("attention_bias")),
            vocab_size=vocab_size,
            draft_vocab_size=None if self._get("draft_vocab_size") is None else self._int("draft_vocab_size"),
            max_position_embeddings=self._int("max_position_embeddings"),
            input_embedding_scale=self._float("input_embedding_scale", 1.0),
            output_multiplier=self._float("output_multiplier", 1.0),
            final_logit_softcapping=softcapping if softcapping > 0 else None,
            dflash2=self._dflash2() if dflash2 else None,
        )

    def _is_dflash2(self) -> bool:
        architectures = self._top.get("architectures")
        if architectures not in (["DFlashDraftModel"], ["DFlash2DraftModel"]):
            supported = "['DFlashDraftModel'] or ['DFlash2DraftModel']"
            raise self._wrong("architectures", f"must be {supported}, is {architectures!r}")
        return bool(architectures == ["DFlash2DraftModel"])

    def _dflash2(self) -> DFlash2Config:
        hidden_size, group_size = self._int("hidden_size"), self._int("conv_group_size")
        if hidden_size % group_size:
            raise self._wrong("conv_group_size", f"must divide hidden_size {hidden_size}, is {group_size}")
        head = "vocab_size" if self._get("draft_vocab_size") is None else "draft_vocab_size"
        top_k = self._int("selector_top_k")
        if top_k > self._int(head):
            raise self._wrong("selector_top_k", f"must be at most {head} {self._int(head)}, is {top_k}")
        return DFlash2Config(self._int("conv_kernel_size"), group_size, self._int("selector_rank"), top_k)

    def _refuse_unknown_keys(self, draft_keys: frozenset[str]) -> None:
        for key in sorted(self._top.keys() - _USED_KEYS - _HARMLESS_KEYS - draft_keys):
            raise self._unknown(key, key)
        for key in sorted(self._inner.keys() - draft_keys):
            raise self._unknown(key, f"dflash_config.{key}")
        for key, supported in (("model_type", "qwen3"), ("hidden_act", "silu")):
            value = self._top.get(key, supported)
            if value != supported:
                raise self._wrong(key, f"{value!r} is not supported; supported: {supported}")

    def _target_layer_ids(self, num_target_layers: int | None, draft_layers: int) -> tuple[int, ...]:
        ids = self._get("target_layer_ids")
        if ids is None:
            if num_target_layers is None:
                raise self._wrong("target_layer_ids", "missing, and so is num_target_layers, which gives the default")
            if draft_layers == 1:
                return (num_target_layers // 2,)
            ids = [round(1 + i * (num_target_layers - 4) / (draft_layers - 1)) for i in range(draft_layers)]
        if not isinstance(ids, list) or not ids or not all(_is_int(i) and i >= 0 for i in ids):
            raise self._wrong("target_layer_ids", f"must be a list of layer indices, is {ids!r}")
        if num_target_layers is not None and max(ids) >= num_target_layers:
            raise self._wrong("target_layer_ids", f"{max(ids)} is not below num_target_layers {num_target_layers}")
        return tuple(ids)

    def _layers(self, count: int) -> tuple[DraftLayer, ...]:
        window = None
        if self._bool("use_sliding_window"):
            window = self._int("sliding_window")
        types = self._top.get("layer_types")
        if types is None:
            first_sliding = self._first_sliding_layer() if window else count
            types = ["sliding_attention" if i >= first_sliding else "full_attention" for i in range(count)]
        if not isinstance(types, list) or len(types) != count:
            raise self._wrong("layer_types", f"must be a list of num_hidden_layers {count} names, is {types!r}")
        causal = self._bool("is_causal")
        layers = []
        for layer_type in types:
            if layer_type not in ("full_attention", "sliding_attention"):
                raise self._wrong("layer_types", f"{layer_type!r} is not supported")
            sliding = layer_type == "sliding_attention"
            if sliding and window is None:
                raise self._wrong("use_sliding_window", "must be true, as layer_types has sliding_attention")
            layers.append(DraftLayer(sliding if causal is None else causal, window if sliding else None))
        return tuple(layers)

    def _first_sliding_layer(self) -> int:
        given = self._top.get("max_window_layers") is not None
        return self._int("max_window_layers", minimum=0) if given else _QWEN3_MAX_WINDOW_LAYERS

    def _rope(self) -> RopeConfig:
        try:
            return RopeConfig.from_config(self._top)
        except ValueError as error:
            raise StartupError(f"{self._file}: {error}") from None

    def _get(self, key: str) -> Any:
        value = self._inner.get(key) if key in _DRAFT_KEYS | _DFLASH2_KEYS else None
        return self._top.get(key) if value is None else value

    def _int(self, key: str, minimum: int = 1, multiple_of: int = 1) -> int:
        value = self._get(key)
        if value is None:
            raise self._wrong(key, "missing")
        if not _is_int(value) or value < minimum or value % multiple_of:
            kind = "an integer" if multiple_of == 1 else f"a multiple of {multiple_of}"
            raise self._wrong(key, f"must be {kind}, at least {minimum}, is {value!r}")
        return int(value)

    def _float(self, key: str, default: float | None) -> float:
        value = self._get(key)
        if value is None and default is None:
            raise self._wrong(key, "missing")
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, f"must be a number, is {value!r}")
        return float(value)

    def _bool(self, key: str) -> bool | None:
        value = self._top.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(key, f"must be true or false, is {value!r}")
        return value

    def _unknown(self, key: str, path: str) -> StartupError:
        if key in _VARIANTS:
            return self._wrong(path, f"is a key {_VARIANTS[key]}")
        return self._wrong(path, "unknown key: it may change what the network computes, so it is refused")

    def _wrong(self, key: str, reason: str) -> StartupError:
        return StartupError(f"{self._file}: {key}: {reason}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
