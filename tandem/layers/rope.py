"""Rotary position embedding: scalings default, llama3 and yarn; pairs half a head apart (Neox) or next to each other.

Sources: RoFormer (arXiv 2104.09864); YaRN (arXiv 2309.00071); the llama3 rule as in Llama 3.1's reference code.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

_ROPE_KEYS = {
    "default": set(),
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
        "truncate",
    },
}
_REQUIRED_KEYS = {
    "default": set(),
    "llama3": _ROPE_KEYS["llama3"],
    "yarn": {"factor", "original_max_position_embeddings"},
}


@dataclass(frozen=True)
class RopeConfig:
    """What a config.json says about rotary embedding."""

    rope_type: str
    theta: float
    scaling: dict[str, Any]
    """The scaling's own parameters, by their config.json names."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "RopeConfig":
        """Reads `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling`; ValueError names a bad key."""
        key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
        block = dict(config.get(key) or {})
        theta = block.pop("rope_theta", config.get("rope_theta"))
        old_type = block.pop("type", "default")
        rope_type = block.pop("rope_type", old_type)
        if rope_type not in _ROPE_KEYS:
            raise ValueError(f"{key}.rope_type: {rope_type!r} is not supported; supported: {', '.join(_ROPE_KEYS)}")
        unknown = sorted(set(block) - _ROPE_KEYS[rope_type])
        if unknown:
            raise ValueError(f"{key}.{unknown[0]}: unknown key for rope type {rope_type!r}")
        missing = sorted(_REQUIRED_KEYS[rope_type] - set(block))
        if missing:
            raise ValueError(f"{key}.{missing[0]}: missing")
        if theta is None:
            raise ValueError("rope_theta: missing")
        return cls(rope_type, float(theta), block)

    def inverse_frequencies(self, head_dim: int) -> torch.Tensor:
        """[head_dim / 2] fp32."""
        exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        inv_freq = 1.0 / (self.theta**exponent)
        if self.rope_type == "llama3":
            return self._llama3(inv_freq)
        if self.rope_type == "yarn":
            return self._yarn(inv_freq, head_dim)
        return inv_freq

    @property
    def amplitude(self) -> float:
        """Multiplier of cos and sin; 1 except for yarn."""
        if self.rope_type != "yarn":
            return 1.0
        if self.scaling.get("attention_factor") is not None:
            return float(self.scaling["attention_factor"])
        m, m_all = self.scaling.get("mscale"), self.scaling.get("mscale_all_dim")
        return self._mscale(m) / self._mscale(m_all) if m and m_all else self._mscale(1.0)

    @property
    def softmax_factor(self) -> float:
        """Multiplier of attention's scale in DeepSeek-V3's yarn; others leave it out."""
        m_all = self.scaling.get("mscale_all_dim")
        return self._mscale(m_all) ** 2 if m_all else 1.0

    def _mscale(self, m: float) -> float:
        factor = self.scaling["factor"]
        return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0

    def _llama3(self, inv_freq: torch.Tensor) -> torch.Tensor:
        s = self.scaling
        original, low, high = (
            s["original_max_position_embeddings"],
            s["low_freq_factor"],
            s["high_freq_factor"],
        )
        wavelength = 2 * math.pi / inv_freq
        smooth = ((original / wavelength - low) / (high - low)).clamp(0, 1)
        return (1 - smooth) * inv_freq / s["factor"] + smooth * inv_freq

    def _yarn(self, inv_freq: torch.Tensor, head_dim: int) -> torch.Tensor:
        s = self.scaling

        def correction(rotations: float) -> float:
            original = s["original_max_position_embeddings"]
            return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = correction(s.get("beta_fast") or 32.0), correction(s.get("beta_slow") or 1.0)
        if s.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        span = high - low if high != low else 0.001
        ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
        return inv_freq * (1 - ramp) + inv_freq / s["factor"] * ramp


def rope_table(
    rope: RopeConfig, head_dim: int, positions: int, dtype: torch.dtype, in_pairs: bool = False
) -> torch.Tensor:
    """[positions, 2, head_dim]: cos and sin of every position, computed in fp32, stored in `dtype`.

    The sines that the first of a pair takes are negated, which saves the rotation the negation of half the vector.
    in_pairs: for apply_rope_to_pairs, otherwise for apply_rope.
    """
    angles = torch.outer(torch.arange(positions).float(), rope.inverse_frequencies(head_dim))
    cos, sin = angles.cos(), angles.sin()
    if in_pairs:
        both = torch.stack((torch.stack((cos, cos), dim=-1), torch.stack((-sin, sin), dim=-1)), dim=1).flatten(-2)
    else:
        both = torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)), dim=1)
    return (both * rope.amplitude).to(dtype)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [..., head_dim], pairs half a head apart; cos and sin are rope_table's and broadcast against x."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def apply_rope_to_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The same for pairs of neighbours (DeepSeek); they stay neighbours."""
    return torch.addcmul(x * cos, x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2), sin)
