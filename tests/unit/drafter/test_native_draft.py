"""The draft network on the CPU's native path: the torch network's drafts, whatever is drafted beside."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from safetensors.torch import load_file, save_file

from drafter_service.draft_model import BlockRequest, ContextRows, DraftModel
from drafter_service.draft_network import DraftNetwork
from drafter_service.loading import load_draft_model
from drafter_service.metrics import DrafterMetrics
from drafter_service.native_draft_model import NativeDraftModel
from tandem.checkpoints.draft_config import DraftConfig
from tandem.checkpoints.gguf_blocks import round_to_q8
from tandem.config import DrafterConfig
from tandem.draft_tree import Candidates, best_chain, build_tree
from tandem.errors import StartupError
from tandem.native import library
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
from tests.fakes.trees import token_paths

CPU = torch.device("cpu")
FORMS = pytest.mark.parametrize("int8", [True, False], ids=["int8", "bf16"])


@pytest.fixture(scope="module", params=["DFlash", "DFlash2"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A draft model and its target, in bf16, so that fp32 arithmetic on them is the oracle."""
    dflash2 = dflash2_config({"conv_kernel_size": 4, "conv_group_size": 32, "selector_rank": 16}, **FULL_ATTENTION)
    folder, config = tmp_path_factory.mktemp("native"), dflash2 if request.param == "DFlash2" else draft_config()
    draft, target = write_draft(folder / "draft", config, draft_tensors(config)), write_target(folder / "target")
    for file in (draft / "model.safetensors", target / "model.safetensors"):
        save_file({name: t.bfloat16() for name, t in load_file(file).items()}, file)
    return draft, target


def native(folders: tuple[Path, Path], int8: bool, threads: int = 2) -> NativeDraftModel:
    return NativeDraftModel(DraftNetwork.load(*folders, torch.bfloat16, CPU), int8, threads)


@pytest.fixture(scope="module")
def model_of(folders: tuple[Path, Path]) -> Callable[[bool], NativeDraftModel]:
    return cache(lambda int8: native(folders, int8))


def oracles(folders: tuple[Path, Path]) -> Callable[[int], DraftModel]:
    """The torch network in fp32 by how many masks its blocks have."""

    @cache
    def of(masks: int) -> DraftModel:
        network = DraftNetwork.load(*folders, torch.float32, CPU)
        network.config = replace(network.config, block_size=1 + masks)
        return DraftModel(network)

    return of


def features(positions: int, seed: int) -> torch.Tensor:
    return torch.randn(positions, HIDDEN, generator=torch.Generator().manual_seed(seed)).bfloat16()


def request(model: Any, base: int, nodes: int = 7, shape: DraftShape = DraftShape.BLOCK, piece: int = 10**6) -> Any:
    """To draft behind a new context, which is written in pieces."""
    kv, rows = model.new_context(), features(base, base)
    for start in range(0, base, piece):
        model.write_context([ContextRows(kv, start, rows[start : start + piece])])
    return BlockRequest(kv, base, base % 500, nodes, shape)


@FORMS
def test_logits_are_close_to_fp32_arithmetic(
    model_of: Callable[[bool], NativeDraftModel], folders: tuple[Path, Path], int8: bool
) -> None:
    """Behind short and long contexts, written whole and in pieces, and past the positions it was trained for. Measured:
    up to 3.4 % (DFlash2 4.4 %) in int8 and 0.6 % in bf16, where torch's paths are off by up to 3.9 (5.9) and 1.2 %
    (2.6 %)."""
    model, oracle = model_of(int8), DraftModel.load(*folders, torch.float32, CPU)
    bound = (0.05 if oracle.config.dflash2 else 0.04) if int8 else 0.01
    for base, piece in ((1, 1), (7, 3), (64, 64), (300, 41), (700, 500)):
        ours = model.block_logits([request(model, base, piece=piece)])
        theirs = oracle.block_logits([request(oracle, base)])
        assert (ours - theirs).norm() < bound * theirs.norm()


def test_a_block_has_as_many_masks_as_nodes_are_wanted(
    model_of: Callable[[bool], NativeDraftModel], folders: tuple[Path, Path]
) -> None:
    """So its logits are those of a network with blocks of that length, not those of a longer block's first slots."""
    model, oracle_of = model_of(False), oracles(folders)
    for nodes in (1, 2, 5, 6):
        ours = model.block_logits([request(model, 40, nodes)])
        theirs, longer = (oracle_of(n).block_logits([request(oracle_of(7), 40, nodes)]) for n in (nodes, 7))
        assert ours.shape == theirs.shape
        assert (ours - theirs).norm() < 0.01 * theirs.norm()
        assert (ours - longer).norm() > 0.02 * longer.norm()


@FORMS
def test_a_blocks_bits_depend_on_nothing_beside_it(
    model_of: Callable[[bool], NativeDraftModel], folders: tuple[Path, Path], int8: bool
) -> None:
    """Alone, among others, with any number of threads, with a context written whole beside others or row by row."""
    lengths = (5, 1, 300, 64, 17)
    expected = [model_of(int8).block_logits([request(model_of(int8), n)]) for n in lengths]
    for threads in (1, 2, 5):
        model = native(folders, int8, threads)
        kvs = [model.new_context() for _ in lengths]
        model.write_context([ContextRows(kv, 0, features(n, n)) for kv, n in zip(kvs, lengths, strict=True)])
        together = [BlockRequest(kv, n, n % 500, 7) for kv, n in zip(kvs, lengths, strict=True)]
        assert torch.equal(model.block_logits(together), torch.cat(expected))
        together[2] = request(model, 300, piece=1)
        assert torch.equal(model.block_logits(together), torch.cat(expected))


@pytest.mark.parametrize("folders", ["DFlash"], indirect=True)
def test_blocks_and_trees_are_those_of_the_logits(model_of: Callable[[bool], NativeDraftModel]) -> None:
    """In one forward, in any order; fewer nodes than slots take the first slots."""
    model = model_of(True)
    wanted = [(20, DraftShape.TREE), (7, DraftShape.BLOCK), (1, DraftShape.TREE), (3, DraftShape.BLOCK)]
    requests = [request(model, 5 + i, nodes, shape) for i, (nodes, shape) in enumerate(wanted)]
    logits = model.block_logits(requests).split([min(nodes, 7) for nodes, _ in wanted])
    for draft, rows, (nodes, shape) in zip(model.draft(requests), logits, wanted, strict=True):
        best = rows.log_softmax(dim=-1).topk(20)
        candidates = Candidates(best.indices.tolist(), best.values[:, None].tolist())
        expected = (build_tree if shape is DraftShape.TREE else best_chain)(candidates, nodes)
        assert len(draft) == nodes
        assert (draft.tokens, draft.parents) == (expected.tokens, expected.parents)
        assert draft.log_probs == pytest.approx(expected.log_probs, abs=1e-5)


@FORMS
@pytest.mark.parametrize("folders", ["DFlash2"], indirect=True)
def test_what_the_selector_chooses_is_what_the_torch_network_chooses(
    model_of: Callable[[bool], NativeDraftModel], folders: tuple[Path, Path], int8: bool
) -> None:
    """Blocks and trees behind contexts of many lengths, in one forward: the same tokens with log-probabilities as near
    as the arithmetic allows, in most places; where near-ties go the other way the drafts part. Measured: 98 % of the
    nodes in bf16, 65 % in int8, where these random weights leave all tokens close to each other."""
    model, oracle_of = model_of(int8), oracles(folders)
    wanted = [(7, DraftShape.BLOCK), (3, DraftShape.BLOCK), (20, DraftShape.TREE), (1, DraftShape.TREE)] * 10
    ours = model.draft([request(model, 5 + i, nodes, shape) for i, (nodes, shape) in enumerate(wanted)])
    theirs = [
        oracle_of(min(nodes, 7)).draft([request(oracle_of(7), 5 + i, nodes, shape)])[0]
        for i, (nodes, shape) in enumerate(wanted)
    ]
    firsts = {True: 0, False: 0}
    alike = nodes = 0
    errors = []
    for mine, other, (asked, _) in zip(ours, theirs, wanted, strict=True):
        assert len(mine) == len(other)
        firsts[asked >= 7] += mine.tokens[0] == other.tokens[0]
        paths = [dict(zip(token_paths(d), d.log_probs, strict=True)) for d in (mine, other)]
        both = paths[0].keys() & paths[1].keys()
        alike, nodes = alike + len(both), nodes + len(mine)
        errors += [abs(paths[0][path] - paths[1][path]) for path in both]
    whole, short = firsts[True], firsts[False]
    assert whole + short >= 30 if int8 else (whole == 20 and short >= 19), firsts
    assert alike > (0.55 if int8 else 0.95) * nodes, alike / nodes
    assert sum(errors) < (0.2 if int8 else 0.02) * len(errors), sum(errors) / len(errors)


def test_rejected_blocks_leave_no_trace(model_of: Callable[[bool], NativeDraftModel]) -> None:
    model, rows = model_of(True), features(20, 20)
    kv = model.new_context()
    model.write_context([ContextRows(kv, 0, rows[:10])])
    for anchor in (1, 2, 3):
        model.draft([BlockRequest(kv, 10, anchor, 7)])
    model.write_context([ContextRows(kv, 10, rows[10:])])
    assert model.draft([BlockRequest(kv, 20, 20, 7)]) == model.draft([request(model, 20)])


def test_of_equal_logits_the_first_columns_are_drafted(tmp_path: Path) -> None:
    """Tokens of a reduced head whose rows are all alike."""
    tokens = torch.arange(3, 99, 3)
    config = draft_config(draft_vocab_size=len(tokens))
    tensors = {**draft_tensors(draft_config()), "d2t": tokens - torch.arange(len(tokens))}
    target = write_target(tmp_path / "target", tied=False)
    file = target / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, "lm_head.weight": torch.ones_like(weights["lm_head.weight"])}, file)
    model = native((write_draft(tmp_path / "draft", config, tensors), target), int8=True)
    (block,) = model.draft([request(model, 4)])
    assert block.tokens == [3] * 7
    assert block.log_probs == pytest.approx([-torch.tensor(32.0).log().item()] * 7)
    (tree,) = model.draft([request(model, 4, 30, DraftShape.TREE)])
    assert {token for token, parent in zip(tree.tokens, tree.parents, strict=True) if parent == 0} <= {*range(3, 99, 3)}


@pytest.fixture
def torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def load(draft: Path, target: Path, **keys: Any) -> Any:
    section = DrafterConfig.model_validate({"device": "cpu", "graphs": {"mode": "auto"}, **keys})
    return load_draft_model(draft, target, section, DrafterMetrics(CollectorRegistry()))


@pytest.mark.usefixtures("torch_threads")
def test_the_configuration_chooses_the_path(folders: tuple[Path, Path]) -> None:
    """Torch, which has little left to do, has one thread beside the native path."""
    assert type(load(*folders, cpu_kernels="torch")) is DraftModel
    native_ones: list[dict[str, Any]] = [{}, {"quantization": "int8"}, {"cpu_kernels": "native"}]
    for keys in native_ones:
        assert type(load(*folders, **keys)) is NativeDraftModel
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("config", "keys", "reason"),
    [
        ({}, {"dtype": "float32"}, "not bfloat16"),
        ({}, {"graphs": {"mode": "on"}, "kv_blocks": 40, "kv_block_tokens": 16}, "graphs are on"),
        ({"is_causal": True}, {}, "causal or sliding"),
        (
            {"sliding_window": 5, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 3},
            {},
            "causal or sliding",
        ),
        ({"attention_bias": True}, {}, "biases"),
        ({"output_multiplier": 0.5}, {}, "scales or caps"),
        ({"input_embedding_scale": 0.5}, {}, "scales embeddings"),
        ({"intermediate_size": 100}, {}, "intermediate_size, 100, is not a multiple of 32"),
        (dflash2_config({"selector_rank": 12}, **FULL_ATTENTION), {}, "selector_rank, 12, is not a multiple of 16"),
        (
            dflash2_config({"selector_rank": 16, "conv_group_size": 8}, **FULL_ATTENTION),
            {},
            "conv_group_size, 8, is not",
        ),
    ],
)
def test_what_it_cannot_run_torch_runs_and_the_log_says_why(
    config: dict[str, Any],
    keys: dict[str, Any],
    reason: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    content = config if "architectures" in config else draft_config(**config)
    draft = write_draft(tmp_path / "draft", content, draft_tensors(content))
    target = write_target(tmp_path / "target")
    with pytest.raises(StartupError, match=rf"drafter\.cpu_kernels: native .*{reason}"):
        load(draft, target, cpu_kernels="native", **keys)
    with caplog.at_level(logging.INFO):
        assert not isinstance(load(draft, target, **keys), NativeDraftModel)
    assert reason in caplog.text


def test_without_a_compiler_torch_drafts(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    library.load.cache_clear()
    with caplog.at_level(logging.INFO):
        assert type(load(*folders)) is DraftModel
    library.load.cache_clear()
    assert "no C++ compiler" in caplog.text


def test_weights_are_rounded_to_the_nearest_of_8_bits() -> None:
    """Of each group by its own scale, which is fp16; groups of zeros, and of values too small for fp16, too."""
    weight = torch.randn(16, 96, generator=torch.Generator().manual_seed(0))
    weight[3, :32] = 0
    weight[4, 32:64] *= 1e-9
    rounded = round_to_q8(weight)
    steps = rounded.scales.float().repeat_interleave(32, dim=1)
    assert ((rounded.dense() - weight).abs() <= 0.501 * steps + 1e-8).all()
    assert rounded.values.abs().max() == 127


def test_the_rotations_grow_with_the_sequences(folders: tuple[Path, Path]) -> None:
    """A position has the same rotation whatever the table's length, so a context does not depend on when it grew."""
    model, longest = native(folders, int8=True), DraftConfig.load(folders[0]).max_position_embeddings
    early = model.block_logits([request(model, 100)])
    model.draft([request(model, longest + 10)])
    assert torch.equal(model.block_logits([request(model, 100)]), early)
