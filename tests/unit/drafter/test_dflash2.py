"""DFlash2 draft models against the DFlash authors' own code (PyPI `dflash`), float32 on CPU."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash.model import DFlash2DraftModel
from prometheus_client import CollectorRegistry
from safetensors.torch import load_file
from scipy.stats import chisquare
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

from drafter_service.draft_model import BlockRequest, ContextRows, DraftModel
from drafter_service.metrics import DrafterMetrics
from drafter_service.paged_draft_model import PagedDraftModel
from tandem.draft_tree import Candidates, build_tree, sample_chain
from tandem.layers.dflash2 import grouped_conv
from tandem.speculation import DraftShape
from tests.fakes.draft_folders import (
    FULL_ATTENTION,
    HIDDEN,
    dflash2_config,
    draft_config,
    draft_tensors,
    write_draft,
    write_target,
)

CPU = torch.device("cpu")
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as published": ({}, {}),
    "full attention": ({}, FULL_ATTENTION),
    "full attention, causal": ({}, FULL_ATTENTION | {"is_causal": True}),
    "causal where sliding": (
        {},
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "is_causal": ...},
    ),
    "window shorter than the block": ({"block_size": 16}, {"sliding_window": 5}),
    "block of two": ({"block_size": 2}, {}),
    "block of five, three taps, groups of four": (
        {"block_size": 5, "conv_kernel_size": 3, "conv_group_size": 4},
        {},
    ),
    "one tap, one group": ({"conv_kernel_size": 1, "conv_group_size": HIDDEN}, {}),
    "one candidate": ({"selector_top_k": 1}, {}),
    "scaled and capped": (
        {"input_embedding_scale": 0.5, "output_multiplier": 0.2, "final_logit_softcapping": 3.0},
        {},
    ),
}


class Oracle:
    """The authors' network over the whole context at once, without a cache."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, torch.Tensor], target: Path):
        self.net = DFlash2DraftModel(Qwen3Config(**config)).float().eval()
        for codebook in ("predecessor_codebook", "successor_codebook"):
            name = f"candidate_selector.{codebook}"
            tensors = {**tensors, f"{name}.weight": tensors[name]}
            del tensors[name]
        self.net.load_state_dict(tensors)
        self._embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
        self._scale = config["dflash_config"].get("input_embedding_scale", 1.0)
        self.only: torch.Tensor | None = None
        """The tokens of a reduced head."""

    @torch.inference_mode()
    def features(self, taps: torch.Tensor) -> torch.Tensor:
        return self.net.hidden_norm(self.net.fc(taps))

    @torch.inference_mode()
    def hidden(self, taps: torch.Tensor, anchor: int) -> torch.Tensor:
        """[1, block - 1, hidden]: what the proposals behind all of `taps` are made of."""
        block, base = self.net.block_size, len(taps)
        ids = torch.tensor([anchor] + [self.net.mask_token_id] * (block - 1))
        return self.net(
            position_ids=torch.arange(base + block)[None],
            noise_embedding=self._embedding[ids][None] * self._scale,
            target_hidden=taps[None],
        )[:, 1:]

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = hidden @ self._embedding.T
        if self.only is not None:
            kept = torch.full_like(logits, -1e9)
            kept[..., self.only] = logits[..., self.only]
            return kept
        return logits

    @torch.inference_mode()
    def propose(self, hidden: torch.Tensor, anchor: int, temperature: float) -> Any:
        """(path [slots], candidates [slots, k], q [slots, k] or None)."""
        path, candidates, q = self.net.propose(hidden, torch.tensor([anchor]), self.head, temperature)
        return path[0].tolist(), candidates[0], None if q is None else q[0]

    def distribution(self, hidden: torch.Tensor, slot: int, before: int, temperature: float = 1.0) -> dict[int, float]:
        """Token -> probability in one slot behind a given token."""
        _, candidates, q = self.propose(hidden[:, slot : slot + 1], before, temperature)
        return dict(zip(candidates[0].tolist(), q[0].tolist(), strict=True))


def make_pair(folder: Path, inner: dict[str, Any] | None = None, **changes: Any) -> tuple[DraftModel, Oracle]:
    config = dflash2_config(inner, **changes)
    tensors = draft_tensors(config)
    target = write_target(folder / "target")
    draft = write_draft(folder / "draft", config, tensors)
    return DraftModel.load(draft, target, torch.float32, CPU), Oracle(config, tensors, target)


def random_taps(positions: int, seed: int) -> torch.Tensor:
    return torch.randn(positions, 3 * HIDDEN, generator=torch.Generator().manual_seed(seed))


def request_behind(
    model: DraftModel, features: torch.Tensor, anchor: int, nodes: int = 99, shape: DraftShape = DraftShape.BLOCK
) -> BlockRequest:
    kv = model.new_context()
    model.write_context([ContextRows(kv, 0, features)])
    return BlockRequest(kv, len(features), anchor, nodes, shape)


def assert_same_candidates(ours: Candidates, oracle: Oracle, hidden: torch.Tensor, anchor: int) -> None:
    """Every slot's candidates, and the probability of each behind each candidate of the slot before."""
    assert len(ours.tokens) == hidden.shape[1]
    for slot, tokens in enumerate(ours.tokens):
        before = [anchor] if slot == 0 else ours.tokens[slot - 1]
        assert len(ours.log_probs[slot]) == len(before)
        for token, row in zip(before, ours.log_probs[slot], strict=True):
            expected = oracle.distribution(hidden, slot, token)
            assert set(tokens) == set(expected)
            assert [math.exp(x) for x in row] == pytest.approx([expected[t] for t in tokens], rel=2e-3, abs=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_drafts_equal_the_reference_round_after_round(variant: str, tmp_path: Path) -> None:
    """Whatever the architecture and however the context is cut into pieces: each round's logits, greedy block,
    candidates and conditional probabilities are the reference's over the whole context; with a paged context the
    same block."""
    inner, changes = VARIANTS[variant]
    model, oracle = make_pair(tmp_path, inner, **changes)
    taps = random_taps(60, seed=3)
    features = oracle.features(taps)
    paged = PagedDraftModel(model._network, DrafterMetrics(CollectorRegistry()), 6, 16)
    kv, pages, held = model.new_context(), paged.new_context(), 0
    for base, anchor in ((1, 3), (4, 77), (12, 12), (40, 500), (60, 1)):
        for start in range(held, base, 3):
            rows = features[start : min(start + 3, base)]
            model.write_context([ContextRows(kv, start, rows)])
            assert paged.reserve(pages, start + len(rows))
            paged.write_context([ContextRows(pages, start, rows)])
        held = base
        request = BlockRequest(kv, base, anchor, model.config.block_size - 1)
        hidden = oracle.hidden(taps[:base], anchor)
        expected = oracle.net.compute_logits(hidden[0], oracle.head)
        torch.testing.assert_close(model.block_logits([request]), expected, rtol=1e-4, atol=1e-4)
        block = model.draft([request])[0]
        path, _, _ = oracle.propose(hidden, anchor, 0.0)
        assert block.tokens == path
        assert block.is_chain
        assert paged.draft([BlockRequest(pages, base, anchor, model.config.block_size - 1)])[0].tokens == path
        for slot, (before, token) in enumerate(zip([anchor, *path], path, strict=False)):
            probability = oracle.distribution(hidden, slot, before)[token]
            assert math.exp(block.log_probs[slot]) == pytest.approx(probability, rel=2e-3)
        if base in (4, 60):
            assert_same_candidates(model.candidates([request])[0], oracle, hidden, anchor)


def test_the_selector_changes_what_is_proposed(tmp_path: Path) -> None:
    """Guards the other tests: with these weights the selected path is not the argmax of every slot's logits."""
    model, oracle = make_pair(tmp_path)
    request = request_behind(model, oracle.features(random_taps(30, seed=1)), anchor=7)
    assert model.draft([request])[0].tokens != model.block_logits([request]).argmax(dim=-1).tolist()


def test_reduced_head(tmp_path: Path) -> None:
    """With a reduced head the candidates are the best of its tokens, by their full ids, and codebooks are read at those
    too."""
    config = dflash2_config()
    tensors = draft_tensors(config)
    target = write_target(tmp_path / "target")
    tokens = torch.arange(5, 505, 7)
    reduced = {**config, "draft_vocab_size": len(tokens)}
    d2t = {"d2t": tokens - torch.arange(len(tokens))}
    draft = write_draft(tmp_path / "draft", reduced, {**tensors, **d2t})
    model, oracle = DraftModel.load(draft, target, torch.float32, CPU), Oracle(config, tensors, target)
    oracle.only = tokens
    taps = random_taps(20, seed=2)
    request = request_behind(model, oracle.features(taps), anchor=6)
    hidden = oracle.hidden(taps, 6)
    assert model.draft([request])[0].tokens == oracle.propose(hidden, 6, 0.0)[0]
    assert_same_candidates(model.candidates([request])[0], oracle, hidden, 6)


def test_batch_of_blocks_and_trees_equals_each_alone(tmp_path: Path) -> None:
    """Neither the convolution nor the selector looks across sequences, and a draft has the same bits alone and among
    others of other lengths, shapes and sizes."""
    model, oracle = make_pair(tmp_path)
    features = [oracle.features(random_taps(n, seed=n)) for n in (5, 1, 40, 17)]
    shapes = [(7, DraftShape.BLOCK), (20, DraftShape.TREE), (2, DraftShape.BLOCK), (3, DraftShape.TREE)]

    def requests() -> list[BlockRequest]:
        return [request_behind(model, f, 9 + i, *shapes[i]) for i, f in enumerate(features)]

    assert model.draft(requests()) == [model.draft([request])[0] for request in requests()]


def test_fewer_nodes_are_a_prefix_of_more(tmp_path: Path) -> None:
    """max_nodes cuts a block: it does not change what is proposed."""
    model, oracle = make_pair(tmp_path)
    features = oracle.features(random_taps(12, seed=6))
    full = model.draft([request_behind(model, features, 5)])[0]
    assert len(full) == 7
    for nodes in (1, 2, 6):
        cut = model.draft([request_behind(model, features, 5, nodes)])[0]
        assert cut.tokens == full.tokens[:nodes]
        assert cut.log_probs == pytest.approx(full.log_probs[:nodes], abs=1e-5)


def test_trees_rank_by_the_selector(tmp_path: Path) -> None:
    """A tree is the best-first tree of the conditional probabilities: node by node those of the reference, and with
    siblings ordered behind their own parent."""
    model, oracle = make_pair(tmp_path)
    taps = random_taps(25, seed=9)
    request = request_behind(model, oracle.features(taps), 44, 40, DraftShape.TREE)
    draft = model.draft([request])[0]
    assert draft == build_tree(model.candidates([request])[0], 40)
    assert len(draft) == 40
    hidden = oracle.hidden(taps, 44)
    tokens = [44, *draft.tokens]
    for node, depth in enumerate(draft.depths):
        expected = oracle.distribution(hidden, depth - 1, tokens[draft.parents[node]])
        assert math.exp(draft.log_probs[node]) == pytest.approx(expected[draft.tokens[node]], rel=2e-3)
        siblings = [draft.log_probs[i] for i, p in enumerate(draft.parents) if p == draft.parents[node]]
        assert siblings == sorted(siblings, reverse=True)
    paths = draft.path_log_probs()
    assert paths == sorted(paths, reverse=True)


def test_sampled_blocks_follow_the_reference(tmp_path: Path) -> None:
    """At a temperature, whole chains appear as often as the reference's q says: the product of softmax(S / T) along the
    chain (chi-square over all chains), and log_probs are log q."""
    temperature = 6.0
    model, oracle = make_pair(tmp_path, {"block_size": 3, "selector_top_k": 3, "output_multiplier": 0.05})
    taps = random_taps(10, seed=4)
    request = request_behind(model, oracle.features(taps), 8)
    hidden = oracle.hidden(taps, 8)
    expected = {
        (first, second): p * q
        for first, p in oracle.distribution(hidden, 0, 8, temperature).items()
        for second, q in oracle.distribution(hidden, 1, first, temperature).items()
    }
    candidates = model.candidates([request])[0]
    count, generator = 20000, torch.Generator().manual_seed(1)
    seen: Counter[tuple[int, ...]] = Counter()
    for uniforms in torch.rand(count, 2, generator=generator).tolist():
        draft = sample_chain(candidates, temperature, uniforms)
        seen[tuple(draft.tokens)] += 1
        assert math.exp(sum(draft.log_probs)) == pytest.approx(expected[tuple(draft.tokens)], rel=2e-3)
    assert min(expected.values()) * count > 5, "the test's weights make chains too rare for a chi-square test"
    observed = [seen[chain] for chain in expected]
    total = sum(expected.values())
    assert chisquare(observed, [p * count / total for p in expected.values()]).pvalue > 1e-3


def test_sampling_uses_the_generator(tmp_path: Path) -> None:
    """A generator's state decides what is drawn, and different draws come of it."""
    model, oracle = make_pair(tmp_path, {"output_multiplier": 0.05})
    features = oracle.features(random_taps(10, seed=4))
    requests = [request_behind(model, features, 8), request_behind(model, features, 9, nodes=3)]
    draws = [model.draft(requests, 1.0, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    assert [len(draft) for draft in draws[0]] == [7, 3]
    assert model.draft(requests) == model.draft(requests, temperature=0.0)


def test_only_dflash2_blocks_are_sampled(tmp_path: Path) -> None:
    """A tree's nodes are not draws, and slots that do not see each other's draws are not drawn."""
    model, oracle = make_pair(tmp_path)
    features = oracle.features(random_taps(4, seed=4))
    with pytest.raises(ValueError, match="temperature"):
        model.draft([request_behind(model, features, 8, 9, DraftShape.TREE)], 1.0)
    v1 = draft_config()
    draft = write_draft(tmp_path / "v1", v1, draft_tensors(v1))
    dflash = DraftModel.load(draft, tmp_path / "target", torch.float32, CPU)
    with pytest.raises(ValueError, match="temperature"):
        dflash.draft([request_behind(dflash, features, 8)], 1.0)


def test_bfloat16_is_close_to_float32(tmp_path: Path) -> None:
    """bfloat16 weights give the float32 logits up to bfloat16's precision."""
    model, oracle = make_pair(tmp_path)
    low = DraftModel.load(tmp_path / "draft", tmp_path / "target", torch.bfloat16, CPU)
    features = oracle.features(random_taps(30, seed=8))
    high_logits, low_logits = (m.block_logits([request_behind(m, features, 4)]) for m in (model, low))
    error = (high_logits - low_logits).pow(2).mean().sqrt() / high_logits.pow(2).mean().sqrt()
    assert error < 0.06
    assert len(low.draft([request_behind(low, features, 4)])[0]) == 7


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_grouped_conv_is_its_formula_and_differentiable(slots: int) -> None:
    """Term by term, also with more taps than slots; and autograd agrees with finite differences."""
    generator = torch.Generator().manual_seed(slots)
    taps, groups, hidden = 3, 2, 6
    x, base, dynamic = (
        torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((2, slots, hidden), (taps, hidden), (2, slots, taps, groups))
    )
    y = grouped_conv(x, base, dynamic)
    for b in range(2):
        for t in range(slots):
            for c in range(hidden):
                expected = sum(
                    (base[o, c] + dynamic[b, t, o, c // (hidden // groups)]) * x[b, t - o, c]
                    for o in range(min(taps, t + 1))
                )
                assert y[b, t, c].item() == pytest.approx(expected.item())
    assert torch.autograd.gradcheck(grouped_conv, (x, base, dynamic))
