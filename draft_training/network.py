"""The DFlash and DFlash2 networks as they are trained: many anchors of many conversations in one forward.

Source: DFlash (arXiv 2602.06036) and the PyPI `dflash` reference for DFlash2. The same mathematics as
drafter_service.draft_model, laid out for gradients: parameters carry the published tensor names, the context of a
conversation is projected once for all its anchors, and every block attends to the context before its anchor and to
itself.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from draft_training.block_attention import BlockAttention, View, make_view
from tandem.checkpoints.draft_config import DFlash2Config, DraftConfig
from tandem.layers.dflash2 import grouped_conv, split_kernels
from tandem.layers.rope import rope_table

_SIDES = ("predecessor", "successor")


@dataclass(frozen=True)
class AnchorBatch:
    """Anchors of some conversations. C conversations of at most N context tokens, A anchors each, blocks of B."""

    taps: torch.Tensor
    """[C, N, taps, hidden_size] fp32: raw taps of the context, zeros behind a conversation's end."""
    positions: torch.Tensor
    """[C, A] int64: position of each anchor. A block sees the context before it."""
    tokens: torch.Tensor
    """[C, A, B] int64: the anchor, then the tokens that follow it, which only DFlash2's selector sees."""


class DraftNetwork(nn.Module):
    """state_dict() holds the published tensors, DFlash2's codebooks in two parts each; embedding and head belong to the
    target and are not trained."""

    embedding: torch.Tensor
    head: torch.Tensor
    tap_scale: torch.Tensor
    rope: torch.Tensor

    def __init__(self, config: DraftConfig, embedding: torch.Tensor, head: torch.Tensor, tap_scale: torch.Tensor):
        """embedding [vocab, hidden_size]; head [head rows, hidden_size]; tap_scale [taps]: each tap is multiplied by
        its own, so that `fc` sees taps of equal size. `export_state` folds it into `fc`."""
        super().__init__()
        self.config = config
        hidden, taps = config.hidden_size, len(config.target_layer_ids)
        self.fc = nn.Linear(taps * hidden, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        if config.dflash2:
            self.candidate_selector = _Selector(config, config.dflash2, embedding)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("head", head, persistent=False)
        self.register_buffer("tap_scale", tap_scale, persistent=False)
        # The last block of the longest conversation reaches past its end.
        positions = config.max_position_embeddings + config.block_size
        rope = rope_table(config.rope, config.head_dim, positions, torch.float32)
        self.register_buffer("rope", rope, persistent=False)

    def forward(self, batch: AnchorBatch) -> torch.Tensor:
        """[C, A, B - 1, hidden_size]: every slot behind an anchor, after the last norm."""
        config = self.config
        conversations, anchors, block = batch.tokens.shape
        scaled = (batch.taps * self.tap_scale[:, None]).flatten(2)
        context = self.hidden_norm(self.fc(scaled))
        view = make_view(context, batch.positions, block, self.rope)

        x = self.embedding[config.mask_token_id].expand(conversations, anchors, block, -1).clone()
        x[:, :, 0] = self.embedding[batch.tokens[:, :, 0]]
        x = x * config.input_embedding_scale
        for layer in self.layers[:-1]:
            x = layer(x, view)
        return self.norm(self.layers[-1](x, view, last=True))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] -> [..., head rows] fp32."""
        config = self.config
        logits = F.linear(hidden, self.head).float()
        if config.output_multiplier != 1:
            logits = logits * config.output_multiplier
        if config.final_logit_softcapping is not None:
            logits = torch.tanh(logits / config.final_logit_softcapping) * config.final_logit_softcapping
        return logits

    def export_state(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The published tensors of weights like state_dict()'s: the taps' scale is folded into `fc`, maps into the
        codebooks."""
        scale = self.tap_scale.repeat_interleave(self.config.hidden_size)
        published = {**state, "fc.weight": state["fc.weight"] * scale}
        if self.config.dflash2:
            for side in _SIDES:
                learned = published.pop(f"candidate_selector.{side}_map.weight")
                published[f"candidate_selector.{side}_codebook"] = self.candidate_selector.codebook(
                    state[f"candidate_selector.{side}_codebook"], learned
                )
        return published

    def load_published(self, state: dict[str, torch.Tensor]) -> None:
        """Take over the tensors of a published folder as far as this network has them; DFlash2's own parts keep their
        neutral start where the folder lacks them, and where it has codebooks nothing is left for maps to add. KeyError
        naming others that are missing."""
        state = dict(state)
        state["fc.weight"] = state["fc.weight"] / self.tap_scale.repeat_interleave(self.config.hidden_size)
        own = self.state_dict()
        missing = [n for n in own if n not in state and "_conv." not in n and not n.startswith("candidate_selector.")]
        if missing:
            raise KeyError(f"missing tensors: {', '.join(missing)}")
        for side in _SIDES if self.config.dflash2 else ():
            if f"candidate_selector.{side}_codebook" in state:
                learned = f"candidate_selector.{side}_map.weight"
                state[learned] = torch.zeros_like(own[learned])
        self.load_state_dict({name: state.get(name, tensor) for name, tensor in own.items()})


class _Mlp(nn.Module):
    def __init__(self, config: DraftConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, config: DraftConfig):
        super().__init__()
        if any(layer.causal or layer.window is not None for layer in config.layers):
            raise ValueError("layer_types: only full attention in both directions can be trained")
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = BlockAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = _Mlp(config)
        self.has_convs = config.dflash2 is not None
        if config.dflash2:
            self.attention_conv = _Conv(config, config.dflash2)
            self.mlp_conv = _Conv(config, config.dflash2)

    def forward(self, x: torch.Tensor, view: View, last: bool = False) -> torch.Tensor:
        """x: [C, A, B, hidden_size]. The last layer leaves the anchor's own slot out: nothing is proposed there."""
        normed = self.input_layernorm(x)
        first = 1 if last else 0
        if not self.has_convs:
            x = x[:, :, first:] + self.self_attn(normed, view, first)
            return x + self.mlp(self.post_attention_layernorm(x))
        kernels = self.attention_conv.kernels(normed)
        attended = self.self_attn(self.attention_conv(normed, kernels, 0), view, 0)
        x = x + self.attention_conv(attended, kernels, 1)
        normed = self.post_attention_layernorm(x)
        kernels = self.mlp_conv.kernels(normed)
        return (x + self.mlp_conv(self.mlp(self.mlp_conv(normed, kernels, 0)), kernels, 1))[:, :, first:]


class _Conv(nn.Module):
    """Grouped dynamic causal convolution over a block's slots; starts as the identity."""

    def __init__(self, config: DraftConfig, dflash2: DFlash2Config):
        super().__init__()
        self.taps = dflash2.conv_kernel_size
        base = torch.zeros(2, self.taps, config.hidden_size)
        base[:, 0] = 1
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = nn.Linear(
            config.hidden_size, 2 * self.taps * config.hidden_size // dflash2.conv_group_size, bias=False
        )
        nn.init.zeros_(self.kernel_projection.weight)

    def kernels(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[C, A, B, hidden] -> the dynamic part before and after the sublayer, each [C x A, B, taps, groups]."""
        return split_kernels(self.kernel_projection(x.flatten(0, 1)), self.taps)

    def forward(self, x: torch.Tensor, kernels: tuple[torch.Tensor, torch.Tensor], side: int) -> torch.Tensor:
        """x: [C, A, B, hidden]; side 0 before the sublayer, 1 after it."""
        return grouped_conv(x.flatten(0, 1), self.base_kernel[side], kernels[side]).view_as(x)


class _Selector(nn.Module):
    """Adds to a candidate's logit what its predecessor says; starts by saying nothing.

    A codebook's row is the token's own plus a linear map of the target's embedding of it: what is learned of one token
    holds for those like it, of which there may be too few to learn from.
    """

    embedding: torch.Tensor
    mean: torch.Tensor
    scale: torch.Tensor

    def __init__(self, config: DraftConfig, dflash2: DFlash2Config, embedding: torch.Tensor):
        super().__init__()
        vocab, hidden, rank = config.vocab_size, config.hidden_size, dflash2.selector_rank
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab, rank))
        self.predecessor_map = nn.Linear(hidden, rank, bias=False)
        self.successor_map = nn.Linear(hidden, rank, bias=False)
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)
        nn.init.normal_(self.predecessor_map.weight, std=hidden**-0.5)
        nn.init.zeros_(self.successor_map.weight)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("mean", embedding.mean(dim=0), persistent=False)
        self.register_buffer("scale", 1 / embedding.std(), persistent=False)

    def forward(self, hidden: torch.Tensor, previous: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """hidden [..., hidden_size], previous [...], candidates [..., K] token ids -> [..., K]."""
        query = self.predecessor_codebook[previous] + self.predecessor_map(self._rows(previous))
        query = query * self.hidden_projection(hidden)
        own = self.successor_codebook[candidates] @ query[..., None]
        shared = self._rows(candidates) @ (query @ self.successor_map.weight)[..., None]
        return (own + shared)[..., 0]

    def codebook(self, own: torch.Tensor, learned: torch.Tensor) -> torch.Tensor:
        """[vocab, r]: what every token's own row [vocab, r] and a map's weight [r, hidden_size] make together."""
        return own + (self.embedding - self.mean) @ (learned * self.scale).T

    def _rows(self, tokens: torch.Tensor) -> torch.Tensor:
        return (self.embedding[tokens] - self.mean) * self.scale
