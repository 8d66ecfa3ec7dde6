"""The draft network against the DFlash authors' own code (PyPI `dflash`), float32 on CPU."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash.model import DFlashDraftModel
from prometheus_client import CollectorRegistry
from safetensors.torch import load_file
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

from drafter_service.draft_model import BlockRequest, ContextRows, DraftModel
from drafter_service.metrics import DrafterMetrics
from drafter_service.paged_draft_model import PagedDraftModel
from tandem.draft_tree import Draft
from tandem.layers.argmax import argmax_rows
from tandem.layers.top_k import top_k_rows
from tandem.speculation import DraftShape
from tests.fakes import tiny_models
from tests.fakes.draft_folders import HIDDEN, VOCAB, draft_config, draft_tensors, write_draft, write_target
from tests.fakes.trees import token_paths

SLIDING = {"sliding_window": 5, "use_sliding_window": True}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "full, causal": {"is_causal": True},
    "sliding, causal by default": {**SLIDING, "layer_types": MIXED},
    "sliding, not causal": {**SLIDING, "layer_types": MIXED, "is_causal": False},
    "window shorter than the block, not causal": {
        **SLIDING,
        "layer_types": ["sliding_attention"] * 3,
        "is_causal": False,
    }
    | {"sliding_window": 3},
    "sliding by max_window_layers": {**SLIDING, "layer_types": ..., "max_window_layers": 1},
    "draft keys at the top level": {
        "dflash_config": ...,
        "mask_token_id": 7,
        "target_layer_ids": [0, 9, 2],
        "block_size": 4,
    },
    "dflash_config wins": {
        "mask_token_id": 8,
        "dflash_config": {"mask_token_id": 9, "block_size": 5, "target_layer_ids": [1, 4, 7]},
    },
    "default taps": {"dflash_config": {"mask_token_id": 500}},
    "multi-query": {"num_key_value_heads": 1},
    "attention wider than hidden": {"num_attention_heads": 6, "num_key_value_heads": 6},
    "biases": {"attention_bias": True},
    "rope_parameters": {
        "rope_theta": ...,
        "rope_scaling": ...,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "yarn": {
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
        "rope_theta": 5000.0,
    },
    "one layer": {
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "dflash_config": {"mask_token_id": 500, "target_layer_ids": [5, 6, 7]},
    },
    "scaled embeddings and logits": {
        "dflash_config": {
            "mask_token_id": 500,
            "target_layer_ids": [1, 4, 7],
            "input_embedding_scale": 0.5,
            "output_multiplier": 0.2,
            "final_logit_softcapping": 3.0,
        }
    },
}


class Oracle:
    """The authors' network over the whole context at once, without a cache."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, torch.Tensor], target: dict[str, torch.Tensor]):
        self.net = DFlashDraftModel(Qwen3Config(**config)).float().eval()
        self.net.load_state_dict(tensors)
        self._embedding = target["model.embed_tokens.weight"]
        self._head = target.get("lm_head.weight", self._embedding)
        self._scale = config.get("dflash_config", {}).get("input_embedding_scale", 1.0)

    @torch.inference_mode()
    def features(self, taps: torch.Tensor) -> torch.Tensor:
        """What the verifier sends: [positions, hidden]."""
        return self.net.hidden_norm(self.net.fc(taps))

    @torch.inference_mode()
    def logits(self, taps: torch.Tensor, anchor: int) -> torch.Tensor:
        """[block - 1, vocab] behind all of `taps` [positions, taps x hidden]."""
        block, base = self.net.block_size, len(taps)
        ids = torch.tensor([anchor] + [self.net.mask_token_id] * (block - 1))
        hidden = self.net(
            position_ids=torch.arange(base + block)[None],
            noise_embedding=self._embedding[ids][None] * self._scale,
            target_hidden=taps[None],
        )
        return self.net.compute_logits(hidden[0, 1:], lambda h: h @ self._head.T)


def make_pair(folder: Path, tied: bool = True, **changes: Any) -> tuple[DraftModel, Oracle]:
    config = draft_config(**changes)
    tensors = draft_tensors(config)
    target = write_target(folder / "target", tied=tied)
    draft = write_draft(folder / "draft", config, tensors)
    model = DraftModel.load(draft, target, torch.float32, torch.device("cpu"))
    return model, Oracle(config, tensors, load_file(target / "model.safetensors"))


def random_taps(positions: int, seed: int) -> torch.Tensor:
    return torch.randn(positions, 3 * HIDDEN, generator=torch.Generator().manual_seed(seed))


def block(model: DraftModel, kv: Any, base: int, anchor: int) -> BlockRequest:
    return BlockRequest(kv, base, anchor, model.config.block_size - 1)


def assert_same_draft(model: DraftModel, request: BlockRequest, expected: torch.Tensor) -> None:
    torch.testing.assert_close(model.block_logits([request]), expected, rtol=1e-4, atol=1e-4)
    assert_proposes(model.draft([request])[0], expected)


def assert_proposes(proposals: Draft, expected: torch.Tensor) -> None:
    assert proposals.tokens == expected.argmax(dim=-1).tolist()
    log_probs = expected.log_softmax(dim=-1).amax(dim=-1)
    torch.testing.assert_close(torch.tensor(proposals.log_probs), log_probs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_drafts_equal_the_reference_round_after_round(variant: str, tmp_path: Path) -> None:
    """Whatever the architecture and however the context is cut into pieces, each round's logits, tokens and
    log-probabilities are the reference's over the whole context; with a paged context too."""
    model, oracle = make_pair(tmp_path, **VARIANTS[variant])
    assert model.config.target_layer_ids == tuple(oracle.net.target_layer_ids)
    paged = PagedDraftModel(model._network, DrafterMetrics(CollectorRegistry()), 6, 16)
    taps = random_taps(60, seed=3)
    features = oracle.features(taps)
    kv, pages, held = model.new_context(), paged.new_context(), 0
    for base, anchor in ((1, 3), (2, 511), (4, 77), (11, 0), (12, 12), (40, 500), (47, 9), (60, 1)):
        for start in range(held, base, 3):
            rows = features[start : min(start + 3, base)]
            model.write_context([ContextRows(kv, start, rows)])
            assert paged.reserve(pages, start + len(rows))
            paged.write_context([ContextRows(pages, start, rows)])
        held = base
        expected = oracle.logits(taps[:base], anchor)
        assert_same_draft(model, block(model, kv, base, anchor), expected)
        (draft,) = paged.draft([BlockRequest(pages, base, anchor, model.config.block_size - 1)])
        assert_proposes(draft, expected)


def test_untied_head(tmp_path: Path) -> None:
    """With tie_word_embeddings false, the head is lm_head.weight, not the embedding."""
    model, oracle = make_pair(tmp_path, tied=False)
    taps, kv = random_taps(9, seed=4), model.new_context()
    model.write_context([ContextRows(kv, 0, oracle.features(taps))])
    assert_same_draft(model, block(model, kv, 9, 42), oracle.logits(taps, 42))


def test_rejected_blocks_leave_no_trace(tmp_path: Path) -> None:
    """Drafting twice with other anchors, and committing only part of a block, changes no later draft."""
    model, oracle = make_pair(tmp_path)
    taps = random_taps(20, seed=5)
    features = oracle.features(taps)
    kv = model.new_context()
    model.write_context([ContextRows(kv, 0, features[:10])])
    for anchor in (1, 2, 3):
        model.draft([block(model, kv, 10, anchor)])
    model.write_context([ContextRows(kv, 10, features[10:13])])
    assert_same_draft(model, block(model, kv, 13, 8), oracle.logits(taps[:13], 8))


@pytest.mark.parametrize("variant", ["full", "sliding, causal by default"])
def test_batch_of_sequences_equals_each_alone(variant: str, tmp_path: Path) -> None:
    """A sequence's drafts have the same bits alone and among sequences of other lengths, contexts included."""
    model, oracle = make_pair(tmp_path, **VARIANTS[variant])
    lengths = (5, 1, 300, 64, 17)
    features = [oracle.features(random_taps(n, seed=n)) for n in lengths]
    together = [model.new_context() for _ in lengths]
    model.write_context([ContextRows(kv, 0, rows) for kv, rows in zip(together, features, strict=True)])
    blocks = [block(model, kv, n, 10 + n) for kv, n in zip(together, lengths, strict=True)]
    logits = model.block_logits(blocks).split(model.config.block_size - 1)
    for n, rows, batched in zip(lengths, features, logits, strict=True):
        kv = model.new_context()
        model.write_context([ContextRows(kv, 0, rows)])
        assert torch.equal(model.block_logits([block(model, kv, n, 10 + n)]), batched)


def test_fewer_nodes_are_a_prefix_of_more(tmp_path: Path) -> None:
    """max_nodes cuts a draft: it does not change what is proposed, though slots see each other both ways."""
    model, oracle = make_pair(tmp_path)
    kvs = [model.new_context() for _ in range(3)]
    for kv in kvs:
        model.write_context([ContextRows(kv, 0, oracle.features(random_taps(12, seed=6)))])
    full = model.draft([BlockRequest(kvs[0], 12, 5, 7)])[0]
    for nodes in (1, 2, 6):
        batch = [BlockRequest(kv, 12, 5, n) for kv, n in zip(kvs, (nodes, 7, 1), strict=True)]
        for proposals, n in zip(model.draft(batch), (nodes, 7, 1), strict=True):
            assert proposals.tokens == full.tokens[:n]
            assert proposals.log_probs == pytest.approx(full.log_probs[:n], abs=1e-5)


def best_prefixes(log_probs: torch.Tensor, count: int) -> list[tuple[tuple[int, ...], float]]:
    """The `count` most probable prefixes, best first, over the whole vocabulary [slots, vocab]: the best of one length
    extend the best of the length before."""
    level: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    found: list[tuple[tuple[int, ...], float]] = []
    for row in log_probs.tolist():
        longer = [((*path, token), score + x) for path, score in level for token, x in enumerate(row)]
        level = sorted(longer, key=lambda p: -p[1])[:count]
        found += level
    return sorted(found, key=lambda p: -p[1])[:count]


@pytest.mark.parametrize("nodes", [14, 30])
def test_trees_are_the_most_probable_prefixes_of_the_reference(nodes: int, tmp_path: Path) -> None:
    """By the reference's logits over the whole vocabulary, node for node."""
    model, oracle = make_pair(tmp_path, output_multiplier=0.8)
    taps, kv = random_taps(33, seed=12), model.new_context()
    model.write_context([ContextRows(kv, 0, oracle.features(taps))])
    draft = model.draft([BlockRequest(kv, 33, 17, nodes, DraftShape.TREE)])[0]
    log_probs = oracle.logits(taps, 17).log_softmax(dim=-1)
    expected = best_prefixes(log_probs, nodes)
    assert token_paths(draft) == [path for path, _ in expected]
    assert draft.path_log_probs() == pytest.approx([score for _, score in expected], abs=1e-3)
    assert max(draft.depths) > 2
    assert max(Counter(draft.parents).values()) > 2


def test_small_trees_hold_the_block(tmp_path: Path) -> None:
    """A tree that is not much larger than a block begins with that block."""
    model, oracle = make_pair(tmp_path, output_multiplier=0.8)
    kv = model.new_context()
    model.write_context([ContextRows(kv, 0, oracle.features(random_taps(9, seed=2)))])
    chain = model.draft([block(model, kv, 9, 5)])[0]
    for nodes in (3, 7, 10, 13):
        tree = model.draft([BlockRequest(kv, 9, 5, nodes, DraftShape.TREE)])[0]
        assert len(tree) == nodes
        assert tree.tokens[:7] == chain.tokens[:nodes]
        assert tree.parents[:7] == chain.parents[:nodes]


def test_blocks_and_trees_share_a_forward(tmp_path: Path) -> None:
    """In any order, each draft is the one its request would get alone."""
    model, oracle = make_pair(tmp_path, output_multiplier=0.8)
    wanted = [(20, DraftShape.TREE), (7, DraftShape.BLOCK), (1, DraftShape.TREE), (3, DraftShape.BLOCK)]
    requests = []
    for i, (nodes, shape) in enumerate(wanted):
        kv = model.new_context()
        model.write_context([ContextRows(kv, 0, oracle.features(random_taps(5 + i, seed=i)))])
        requests.append(BlockRequest(kv, 5 + i, 9 + i, nodes, shape))
    drafts = model.draft(requests)
    assert [len(draft) for draft in drafts] == [20, 7, 1, 3]
    for draft, request in zip(drafts, requests, strict=True):
        alone = model.draft([request])[0]
        assert (draft.tokens, draft.parents) == (alone.tokens, alone.parents)
        assert draft.log_probs == pytest.approx(alone.log_probs, abs=1e-5)


def test_trees_of_a_reduced_head(tmp_path: Path) -> None:
    """Nodes carry the target's token ids, and the best prefixes are those among the reduced head's tokens."""
    config = draft_config(output_multiplier=0.8)
    tensors = draft_tensors(config)
    target = write_target(tmp_path / "target")
    tokens = torch.arange(3, 510, 11)
    d2t = {"d2t": tokens - torch.arange(len(tokens))}
    folder = write_draft(tmp_path / "draft", {**config, "draft_vocab_size": len(tokens)}, {**tensors, **d2t})
    model = DraftModel.load(folder, target, torch.float32, torch.device("cpu"))
    oracle = Oracle(config, tensors, load_file(target / "model.safetensors"))
    taps, kv = random_taps(33, seed=12), model.new_context()
    model.write_context([ContextRows(kv, 0, oracle.features(taps))])
    draft = model.draft([BlockRequest(kv, 33, 17, 25, DraftShape.TREE)])[0]
    expected = best_prefixes(oracle.logits(taps, 17)[:, tokens].log_softmax(dim=-1), 25)
    assert token_paths(draft) == [tuple(tokens[i].item() for i in path) for path, _ in expected]
    assert max(draft.depths) > 2


def test_positions_past_the_trained_range_are_drafted(tmp_path: Path) -> None:
    """A sequence that passes max_position_embeddings goes on being drafted at its true positions."""
    model, oracle = make_pair(tmp_path, max_position_embeddings=16)
    taps, kv = random_taps(70, seed=7), model.new_context()
    features = oracle.features(taps)
    model.write_context([ContextRows(kv, 0, features[:14])])
    assert_same_draft(model, block(model, kv, 14, 4), oracle.logits(taps[:14], 4))
    model.write_context([ContextRows(kv, 14, features[14:])])
    assert_same_draft(model, block(model, kv, 70, 4), oracle.logits(taps, 4))


def test_bfloat16_drafts_are_close_to_float32(tmp_path: Path) -> None:
    """bfloat16 weights give the float32 logits up to bfloat16's precision."""
    model, oracle = make_pair(tmp_path)
    low = DraftModel.load(tmp_path / "draft", tmp_path / "target", torch.bfloat16, torch.device("cpu"))
    features = oracle.features(random_taps(30, seed=8))
    logits = []
    for m in (model, low):
        kv = m.new_context()
        m.write_context([ContextRows(kv, 0, features)])
        logits.append(m.block_logits([block(m, kv, 30, 4)]))
    assert logits[1].dtype == torch.float32
    error = (logits[0] - logits[1]).pow(2).mean().sqrt() / logits[0].pow(2).mean().sqrt()
    assert error < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_constant_draft_model(dtype: torch.dtype, tmp_path: Path) -> None:
    """With nothing written by attention and MLP, every slot proposes the head's answer to the mask token."""
    successor = [(token + 1) % tiny_models.VOCAB for token in range(tiny_models.VOCAB)]
    target = tiny_models.map_target(tmp_path / "target", successor)
    draft = tiny_models.constant_draft(tmp_path / "draft", mask_token=500)
    model = DraftModel.load(draft, target, dtype, torch.device("cpu"))
    for length, anchor in ((1, 0), (50, 499)):
        kv = model.new_context()
        model.write_context([ContextRows(kv, 0, torch.randn(length, tiny_models.HIDDEN))])
        assert model.draft([block(model, kv, length, anchor)])[0].tokens == [501] * 7


def test_argmax_takes_the_first_of_equals() -> None:
    """As torch.argmax over whole rows, for vocabularies that do and do not split evenly."""
    generator = torch.Generator().manual_seed(0)
    for columns in (VOCAB, 49152, 1000, 641, 7):
        x = torch.randint(0, 50, (9, columns), generator=generator).float()
        assert torch.equal(argmax_rows(x), torch.stack([(row == row.max()).nonzero()[0, 0] for row in x]))


def test_top_k_is_that_of_whole_rows() -> None:
    """As torch.topk over whole rows, for vocabularies that are and are not searched piece by piece."""
    generator = torch.Generator().manual_seed(0)
    for columns, k in ((49152, 32), (8192, 5), (8192, 32), (1000, 7), (7, 7), (151936, 1)):
        x = torch.randn(5, columns, generator=generator)
        values, indices = top_k_rows(x, k)
        expected = x.topk(k)
        assert torch.equal(values, expected.values)
        assert torch.equal(indices, expected.indices)
