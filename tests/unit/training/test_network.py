"""The network that is trained against the ones that serve: the drafter's, and the authors' own (PyPI `dflash`)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from dflash.model import DFlash2DraftModel, DFlashDraftModel
from safetensors.torch import load_file

from draft_training import block_attention
from draft_training.config import DraftSection
from draft_training.export import draft_config_json, export
from draft_training.initial_weights import load_draft_model
from draft_training.network import AnchorBatch, DraftNetwork
from drafter_service.draft_model import BlockRequest, ContextRows, DraftModel
from tandem.checkpoints.draft_config import DraftConfig
from tandem.checkpoints.folder import CheckpointFolder
from tandem.errors import StartupError
from tandem.speculation import DraftShape
from tests.fakes.tiny_models import HIDDEN, VOCAB
from tests.unit.training.worlds import CPU, MASK, chatting_target
from verifier_service.features import FeatureProjection
from verifier_service.models.architectures import read_config

DFLASH2 = {"conv_kernel_size": 3, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 5}
HEAD = list(range(40, 500, 3))
VARIANTS: dict[str, tuple[dict[str, Any], list[int] | None]] = {
    "DFlash": ({}, None),
    "DFlash, reduced head": ({}, HEAD),
    "DFlash2": ({"dflash2": DFLASH2}, None),
    "DFlash2, reduced head": ({"dflash2": DFLASH2}, HEAD),
}
BLOCK = 5


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation's anchors attend in two parts, the second smaller."""
    monkeypatch.setattr(block_attention, "_PART_ANCHORS", 3)


class World:
    """A network with random bfloat16 weights, its target, and the folder it was exported to."""

    def __init__(self, folder: Path, variant: str, scale: tuple[float, float] = (0.25, 4.0)):
        changes, self.tokens = VARIANTS[variant]
        draft = DraftSection(
            target_layer_ids=(0, 2),
            block_size=BLOCK,
            num_hidden_layers=2,
            intermediate_size=96,
            mask_token_id=MASK,
            draft_vocab_size=len(self.tokens) if self.tokens else None,
            **changes,
        )
        self.target, self.draft = folder / "target", folder / "draft"
        self.oracle_target = chatting_target(self.target)
        checkpoint = CheckpointFolder(self.target)
        self.target_config = read_config(checkpoint)
        self.config_json = draft_config_json(draft, checkpoint.config)
        export(self.draft, self.config_json, {}, None)
        self.embedding = checkpoint.tensor("model.embed_tokens.weight", (VOCAB, HIDDEN), torch.float32)
        head = checkpoint.tensor("lm_head.weight", (VOCAB, HIDDEN), torch.float32)
        rows = head if self.tokens is None else head[self.tokens]
        self.network = DraftNetwork(DraftConfig.load(self.draft), self.embedding, rows, torch.tensor(scale))
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, tensor in self.network.named_parameters():
                width = tensor.shape[-1] if tensor.dim() > 1 else 16
                # All parts matter, and bfloat16 holds them without loss, as the taps' scales are powers of two.
                start = tensor if tensor.dim() < 2 or "base_kernel" in name else torch.zeros_like(tensor)
                tensor.copy_((start + torch.randn(tensor.shape, generator=generator) * 1.2 / width**0.5).bfloat16())
        state = self.network.export_state(self.network.state_dict())
        if self.network.config.dflash2:
            # Of a codebook it is the whole that bfloat16 must hold.
            own = self.network.candidate_selector.state_dict()
            for side in ("predecessor", "successor"):
                name = f"candidate_selector.{side}_codebook"
                state[name] = state[name].bfloat16().float()
                none = torch.zeros_like(state[name])
                mapped = self.network.candidate_selector.codebook(none, own[f"{side}_map.weight"])
                own[f"{side}_codebook"].copy_(state[name] - mapped)
        export(self.draft, self.config_json, state, self.tokens)

    def batch(self, lengths: tuple[int, ...] = (3, 21, 12), anchors: int = 4, seed: int = 0) -> AnchorBatch:
        generator = torch.Generator().manual_seed(seed)
        positions = torch.stack([torch.randint(1, n + 1, (anchors,), generator=generator) for n in lengths])
        taps = torch.randn(len(lengths), max(lengths), 2, HIDDEN, generator=generator)
        for row, length in enumerate(lengths):
            taps[row, length:] = 0
        tokens = torch.randint(0, 400, (len(lengths), anchors, BLOCK), generator=generator)
        return AnchorBatch(taps, positions, tokens)

    @torch.no_grad()
    def run(self, batch: AnchorBatch) -> torch.Tensor:
        """[C, A, B - 1, head rows]: logits."""
        return self.network.logits(self.network(batch))


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_exported_folder_drafts_as_the_network_does(variant: str, tmp_path: Path) -> None:
    """The drafter on the exported folder, with features from the verifier's projection, gives the network's logits at
    every anchor, its best chain, and for DFlash2 the selector's scores of every candidate."""
    world = World(tmp_path, variant)
    batch = world.batch()
    logits = world.run(batch)
    model = DraftModel.load(world.draft, world.target, torch.float32, CPU)
    project = FeatureProjection(world.draft, world.target_config, torch.float32, CPU)
    for row in range(len(batch.positions)):
        for i, position in enumerate(batch.positions[row].tolist()):
            kv, anchor = model.new_context(), int(batch.tokens[row, i, 0])
            model.write_context([ContextRows(kv, 0, project(batch.taps[row, :position].flatten(1)))])
            request = BlockRequest(kv, position, anchor, BLOCK - 1)
            torch.testing.assert_close(model.block_logits([request]), logits[row, i], rtol=1e-4, atol=1e-4)
            if world.network.config.dflash2:
                assert_same_candidates(world, model.candidates([request])[0], batch, row, i)
            else:
                best = logits[row, i].argmax(dim=-1).tolist()
                assert model.draft([request])[0].tokens == [world.tokens[b] if world.tokens else b for b in best]


@torch.no_grad()
def assert_same_candidates(world: World, candidates: Any, batch: AnchorBatch, row: int, anchor_index: int) -> None:
    """Conditional log-probabilities are a softmax of logit + selector over the slot's candidates."""
    hidden = world.network(batch)[row, anchor_index]
    before = [int(batch.tokens[row, anchor_index, 0])]
    for slot, tokens in enumerate(candidates.tokens):
        columns = [world.tokens.index(t) if world.tokens else t for t in tokens]
        unary = world.network.logits(hidden[slot])[columns]
        added = world.network.candidate_selector(
            hidden[slot].expand(len(before), -1), torch.tensor(before), torch.tensor(tokens).expand(len(before), -1)
        )
        expected = (unary + added).log_softmax(dim=-1)
        torch.testing.assert_close(torch.tensor(candidates.log_probs[slot]), expected, rtol=1e-3, atol=1e-3)
        before = tokens


@pytest.mark.parametrize("variant", ["DFlash", "DFlash2"])
@torch.inference_mode()
def test_the_reference_loads_the_folder_and_drafts_the_same(variant: str, tmp_path: Path) -> None:
    """from_pretrained of PyPI's dflash takes the folder as it is and proposes, greedily, the drafter's blocks."""
    world = World(tmp_path, variant)
    kind = DFlash2DraftModel if world.network.config.dflash2 else DFlashDraftModel
    reference, info = kind.from_pretrained(world.draft, dtype=torch.float32, output_loading_info=True)
    reference.eval()
    assert not any(info[keys] for keys in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    model = DraftModel.load(world.draft, world.target, torch.float32, CPU)
    project = FeatureProjection(world.draft, world.target_config, torch.float32, CPU)
    batch, drafts = world.batch(lengths=(30, 9), anchors=6), set()
    for row in range(2):
        for i, position in enumerate(batch.positions[row].tolist()):
            taps, anchor = batch.taps[row, :position].flatten(1), int(batch.tokens[row, i, 0])
            ids = torch.tensor([[anchor] + [MASK] * (BLOCK - 1)])
            hidden = reference(
                position_ids=torch.arange(position + BLOCK)[None],
                noise_embedding=world.embedding[ids],
                target_hidden=taps[None],
            )[:, 1:]
            if world.network.config.dflash2:
                proposed = reference.propose(hidden, ids[:, 0], world.oracle_target.lm_head, 0.0)[0][0]
            else:
                proposed = reference.compute_logits(hidden, world.oracle_target.lm_head)[0].argmax(dim=-1)
            kv = model.new_context()
            model.write_context([ContextRows(kv, 0, project(taps))])
            draft = model.draft([BlockRequest(kv, position, anchor, BLOCK - 1)])[0]
            assert draft.tokens == proposed.tolist()
            drafts.add(tuple(draft.tokens))
    assert len(drafts) > 4, "these weights should tell contexts apart"


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_taps_scale_is_folded_into_fc_and_maps_into_codebooks(variant: str, tmp_path: Path) -> None:
    """What is exported expects the target's taps: fc times each tap's scale; a token's row is its own plus the map of
    its embedding, which all tokens' mean and size are taken out of; all else as it was trained, in bf16."""
    world = World(tmp_path, variant)
    exported = load_file(world.draft / "model.safetensors")
    own = world.network.state_dict()
    assert exported.keys() - {"d2t"} == {name for name in own if "_map." not in name}
    rows = (world.embedding - world.embedding.mean(dim=0)) / world.embedding.std()
    for name, tensor in own.items():
        if "_map." in name:
            continue
        if name.endswith("_codebook"):
            tensor = tensor + rows @ own[name.replace("_codebook", "_map.weight")].T
        # Sums of two parts come in another order there.
        slack = 1e-5 if name.endswith("_codebook") else 0.0
        factor = torch.tensor([0.25, 4.0]).repeat_interleave(HIDDEN) if name == "fc.weight" else 1.0
        assert exported[name].dtype == torch.bfloat16
        torch.testing.assert_close(exported[name].float(), tensor * factor, rtol=2**-8, atol=slack)
    if world.tokens:
        assert (exported["d2t"] + torch.arange(len(world.tokens))).tolist() == world.tokens


@pytest.mark.parametrize("variant", VARIANTS)
def test_loading_what_was_exported_changes_nothing(variant: str, tmp_path: Path) -> None:
    """load_published of export_state is the identity, also in another network whose taps have other scales; so is
    beginning with an exported folder. What maps added to codebooks is in the codebooks then."""
    world = World(tmp_path, variant)
    before = {name: tensor.clone() for name, tensor in world.network.state_dict().items()}
    published = world.network.export_state(before)
    other = DraftNetwork(world.network.config, world.embedding, world.network.head, torch.tensor([2.0, 0.5]))
    other.load_published(published)
    batch = world.batch()
    with torch.no_grad():
        torch.testing.assert_close(other.logits(other(batch)), world.run(batch), rtol=1e-4, atol=1e-4)
    world.network.load_published(published)
    begun = DraftNetwork(world.network.config, world.embedding, world.network.head, torch.tensor([0.25, 4.0]))
    load_draft_model(begun, world.draft)
    exported = load_file(world.draft / "model.safetensors")
    for network, folder in ((world.network, published), (begun, exported)):
        for name, tensor in network.state_dict().items():
            if "_map." in name:
                assert not tensor.any()
            else:
                assert torch.equal(tensor, (folder if name.endswith("_codebook") else before)[name])
        for name, tensor in network.export_state(network.state_dict()).items():
            assert torch.equal(tensor.bfloat16(), exported[name])


def test_dflash2_begins_as_the_dflash_it_is_given(tmp_path: Path) -> None:
    """The convolutions start as the identity and the selector silent; a folder that lacks more is refused by name."""
    v1, v2 = World(tmp_path / "v1", "DFlash"), World(tmp_path / "v2", "DFlash2")
    fresh = DraftNetwork(v2.network.config, v1.embedding, v1.network.head, torch.ones(2))
    load_draft_model(fresh, v1.draft)
    batch = v1.batch()
    with torch.no_grad():
        hidden = fresh(batch)
        torch.testing.assert_close(fresh.logits(hidden), v1.run(batch), rtol=1e-4, atol=1e-4)
        candidates = torch.tensor([[1, 2, 3]]).expand(2, -1)
        assert not fresh.candidate_selector(hidden[0, 0, :2], torch.tensor([7, 8]), candidates).any()
    state = v1.network.export_state(v1.network.state_dict())
    del state["hidden_norm.weight"]
    with pytest.raises(KeyError, match="hidden_norm"):
        fresh.load_published(state)
    (v1.draft / "model.safetensors").unlink()
    export(v1.draft, v1.config_json, state, None)
    with pytest.raises(StartupError, match=r"training.initial_model: .*draft: missing tensors: hidden_norm"):
        load_draft_model(fresh, v1.draft)


@pytest.mark.parametrize("variant", ["DFlash", "DFlash2"])
def test_a_block_sees_the_context_before_its_anchor_and_nothing_else(variant: str, tmp_path: Path) -> None:
    """No gradient flows from a block's logits to a feature at or after its anchor or of another conversation; every
    feature before it matters; other blocks' anchors do not, nor do the tokens that are to be proposed."""
    world = World(tmp_path, variant)
    batch = world.batch()
    taps = batch.taps.clone().requires_grad_()
    logits = world.network.logits(world.network(AnchorBatch(taps, batch.positions, batch.tokens)))
    for row, anchor in ((0, 0), (1, 1), (1, 2), (2, 3)):
        (grad,) = torch.autograd.grad(logits[row, anchor].pow(2).sum(), taps, retain_graph=True)
        size = grad.abs().amax(dim=(2, 3))
        position = int(batch.positions[row, anchor])
        assert (size[row, :position] > 0).all()
        assert not size[row, position:].any()
        assert not torch.cat([size[:row], size[row + 1 :]]).any()
    tokens = batch.tokens.clone()
    tokens[:, :, 1:] += 7
    tokens[1, 2, 0] += 9
    changed = world.run(AnchorBatch(batch.taps, batch.positions, tokens))
    same = torch.ones(batch.positions.shape, dtype=torch.bool)
    same[1, 2] = False
    assert torch.equal(changed[same], logits.detach()[same])
    assert not torch.allclose(changed[1, 2], logits[1, 2])


def test_blocks_reach_past_the_longest_conversation(tmp_path: Path) -> None:
    """An anchor at the target's last position has a whole block, as the drafter gives it."""
    world = World(tmp_path, "DFlash")
    last = world.network.config.max_position_embeddings
    batch = world.batch(lengths=(last,), anchors=1)
    logits = world.run(AnchorBatch(batch.taps, torch.tensor([[last]]), batch.tokens))
    model = DraftModel.load(world.draft, world.target, torch.float32, CPU)
    project = FeatureProjection(world.draft, world.target_config, torch.float32, CPU)
    kv = model.new_context()
    model.write_context([ContextRows(kv, 0, project(batch.taps[0].flatten(1)))])
    request = BlockRequest(kv, last, int(batch.tokens[0, 0, 0]), BLOCK - 1, DraftShape.BLOCK)
    torch.testing.assert_close(model.block_logits([request]), logits[0, 0], rtol=1e-3, atol=1e-3)


def test_exported_files_have_the_usual_mode(tmp_path: Path) -> None:
    """Whoever may read config.json may read the weights; nothing unfinished is left."""
    world = World(tmp_path, "DFlash")
    files = {path.name: path.stat().st_mode & 0o777 for path in world.draft.iterdir()}
    plain = tmp_path / "plain"
    plain.touch()
    assert files == dict.fromkeys(("config.json", "model.safetensors"), plain.stat().st_mode & 0o777)
