"""The demo draft model on text that the demo target wrote itself."""

import math
from pathlib import Path

import pytest
import torch
from dflash.model import DFlash2DraftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from drafter_service.draft_model import BlockRequest, ContextRows, DraftModel
from drafter_service.draft_network import DraftNetwork
from drafter_service.native_draft_model import NativeDraftModel
from tandem.draft_tree import walk
from tandem.speculation import DraftShape

MODELS = Path(__file__).parents[3] / "models"
DRAFT, TARGET = MODELS / "smollm2-135m-dflash", MODELS / "smollm2-135m-instruct"
PROMPT = "<|im_start|>user\nList three uses of a brick.<|im_end|>\n<|im_start|>assistant\n"

pytestmark = [pytest.mark.model, pytest.mark.slow]


@torch.inference_mode()
def test_drafts_equal_the_reference_and_predict_the_target() -> None:
    """In float32, behind every position of a greedy answer, the reference's logits and drafts among the tokens of the
    reduced head; and the first proposal is right as often as a trained one must be (its card says 0.56), which a wrong
    tap, norm, position or mask prevents."""
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    reference = DFlash2DraftModel.from_pretrained(DRAFT, dtype=torch.float32).eval()
    prompt = AutoTokenizer.from_pretrained(TARGET)(PROMPT, return_tensors="pt").input_ids
    ids = target.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=48, do_sample=False)
    hidden = target(ids, output_hidden_states=True).hidden_states
    taps = torch.cat([hidden[i + 1] for i in reference.target_layer_ids], dim=-1)
    features = reference.hidden_norm(reference.fc(taps))[0]

    model = DraftModel.load(DRAFT, TARGET, torch.float32, torch.device("cpu"))
    d2t = load_file(DRAFT / "model.safetensors")["d2t"]
    draft_tokens = d2t + torch.arange(len(d2t))
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()

    def reduced_head(hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.full((*hidden.shape[:-1], len(embedding.weight)), -1e9)
        logits[..., draft_tokens] = head(hidden)[..., draft_tokens]
        return logits

    kv, held, hits, outside = model.new_context(), 0, [], 0
    for base in range(prompt.shape[1], ids.shape[1] - 1):
        anchor = int(ids[0, base])
        model.write_context([ContextRows(kv, held, features[held:base])])
        held = base
        block = torch.tensor([[anchor] + [reference.mask_token_id] * 7])
        slots = reference(
            position_ids=torch.arange(base + 8)[None],
            noise_embedding=embedding(block),
            target_hidden=taps[:, :base],
        )[:, 1:]
        request = BlockRequest(kv, base, anchor, nodes=7)
        among = head(slots)[0, :, draft_tokens]
        torch.testing.assert_close(model.block_logits([request]), among, rtol=1e-3, atol=1e-3)
        tokens = model.draft([request])[0].tokens
        assert tokens == reference.propose(slots, block[:, 0], reduced_head, 0.0)[0][0].tolist()
        whole = reference.propose(slots, block[:, 0], head, 0.0)[0][0].tolist()
        outside += sum(a != b for a, b in zip(tokens, whole, strict=True))
        hits.append(tokens[0] == int(ids[0, base + 1]))
    assert len(hits) > 30
    assert sum(hits) / len(hits) > 0.3
    assert outside / (7 * len(hits)) < 0.05, "the reduced head lacks tokens that the draft model proposes"


@torch.inference_mode()
def test_trees_hold_more_of_what_the_target_says_than_blocks() -> None:
    """Along a greedy answer of the demo target, in bfloat16: trees of 32 nodes reach further into it than blocks of 7
    on average, small ones no less far, those that begin with the block at no anchor, and the draft model's own estimate
    of how far they reach is of the right size."""
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.bfloat16).eval()
    reference = DFlash2DraftModel.from_pretrained(DRAFT, dtype=torch.bfloat16).eval()
    prompt = AutoTokenizer.from_pretrained(TARGET)(PROMPT, return_tensors="pt").input_ids
    ids = target.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=48, do_sample=False)
    hidden = target(ids, output_hidden_states=True).hidden_states
    features = reference.hidden_norm(reference.fc(torch.cat([hidden[i + 1] for i in reference.target_layer_ids], -1)))[
        0
    ]
    answer = ids[0].tolist()
    model = DraftModel.load(DRAFT, TARGET, torch.bfloat16, torch.device("cpu"))

    accepted: dict[tuple[DraftShape, int], list[int]] = {}
    expected = []
    begin_with_block = []
    kv = model.new_context()
    model.write_context([ContextRows(kv, 0, features)])
    for base in range(prompt.shape[1], len(answer) - 8):
        chain: list[int] = []
        for shape, nodes in ((DraftShape.BLOCK, 7), (DraftShape.TREE, 10), (DraftShape.TREE, 32)):
            draft = model.draft([BlockRequest(kv, base, answer[base], nodes, shape)])[0]
            path, _ = walk(draft, lambda index, depth, base=base: answer[base + 1 + depth])
            accepted.setdefault((shape, nodes), []).append(len(path))
            if shape is DraftShape.BLOCK:
                chain = draft.tokens
            elif nodes == 10:
                begin_with_block.append(draft.tokens[:7] == chain)
            if nodes == 32:
                expected.append(sum(math.exp(x) for x in draft.path_log_probs()))
        # The block was written over position base's context: write it again.
        model.write_context([ContextRows(kv, base, features[base:])])
    block = accepted[DraftShape.BLOCK, 7]
    small = accepted[DraftShape.TREE, 10]
    assert any(begin_with_block)
    assert all(s >= b for s, b, begins in zip(small, block, begin_with_block, strict=True) if begins)
    assert sum(small) >= sum(block)
    assert sum(accepted[DraftShape.TREE, 32]) > 1.1 * sum(block)
    assert 0.5 < sum(expected) / sum(accepted[DraftShape.TREE, 32]) < 2


@torch.inference_mode()
def test_the_native_path_accepts_what_torch_does() -> None:
    """Along a greedy answer of the demo target, in bf16 and in int8: nearly always the same blocks, and as much of the
    answer in them."""
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.bfloat16).eval()
    reference = DFlash2DraftModel.from_pretrained(DRAFT, dtype=torch.bfloat16).eval()
    prompt = AutoTokenizer.from_pretrained(TARGET)(PROMPT, return_tensors="pt").input_ids
    ids = target.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=160, do_sample=False)
    hidden = target(ids, output_hidden_states=True).hidden_states
    features = reference.hidden_norm(reference.fc(torch.cat([hidden[i + 1] for i in reference.target_layer_ids], -1)))
    answer = ids[0].tolist()
    network = DraftNetwork.load(DRAFT, TARGET, torch.bfloat16, torch.device("cpu"))
    models: list[DraftModel | NativeDraftModel] = [DraftModel(network)]
    models += [NativeDraftModel(network, int8, threads=2) for int8 in (False, True)]

    accepted, drafted = [0] * 3, [0] * 3
    for base in range(prompt.shape[1], len(answer) - 8):
        tokens = []
        for i, model in enumerate(models):
            kv = model.new_context()
            model.write_context([ContextRows(kv, 0, features[0, :base])])
            (draft,) = model.draft([BlockRequest(kv, base, answer[base], 7)])
            accepted[i] += len(walk(draft, lambda index, depth, base=base: answer[base + 1 + depth])[0])
            tokens.append(draft.tokens)
            drafted[i] += sum(a == b for a, b in zip(tokens[0], tokens[i], strict=True))
    assert accepted[0] > 40
    for i in (1, 2):
        assert drafted[i] > 0.9 * drafted[0]
        assert abs(accepted[i] - accepted[0]) <= 0.1 * accepted[0]
