"""What a target is made of, whatever its architecture is called."""

from dataclasses import dataclass

from tandem.kernels.route import Routing
from tandem.layers.rope import RopeConfig


@dataclass(frozen=True)
class GroupedAttention:
    """Query heads that share keys and values in groups (GQA)."""

    kv_heads: int
    head_dim: int
    qk_norm: bool
    """RMSNorm over every head of q and k before they are rotated."""

    @property
    def rope_dim(self) -> int:
        return self.head_dim


@dataclass(frozen=True)
class LatentAttention:
    """Heads that share one latent vector per token, from which each makes its keys and values (MLA)."""

    q_rank: int | None
    """Width queries are squeezed through; None: they are projected in one go."""
    kv_rank: int
    """Width of the latent."""
    nope_dim: int
    """Dimensions of a head's query and key that know no position."""
    rope_dim: int
    value_dim: int
    interleaved_rope: bool
    """Rotated pairs are neighbours; otherwise half a head apart."""
    scale: float


@dataclass(frozen=True)
class ExpertNames:
    """What an architecture calls its mixture and the weights of an expert."""

    block: str
    gate: str
    up: str
    down: str


PROJECTIONS = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")
"""So are a dense MLP's."""


@dataclass(frozen=True)
class Mixture:
    """The mixture of experts that some layers have in place of a dense MLP."""

    layers: frozenset[int]
    experts: int
    experts_per_token: int
    expert_size: int
    shared_size: int
    """Intermediate size of the experts that every row goes through, taken as one; 0: none."""
    routing: Routing
    names: ExpertNames


@dataclass(frozen=True)
class TargetConfig:
    """What the network needs of config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Of a dense MLP."""
    layers: int
    heads: int
    attention: GroupedAttention | LatentAttention
    mixture: Mixture | None
    eps: float
    rope: RopeConfig
    tied_head: bool
    max_positions: int
    extra_layers: int
    """Layers behind the last one, for prediction of further tokens; they are left unread."""
