"""`tandem bench --profile`: every step is of the kind it says, and its parts are what it took."""

import argparse
import re
from pathlib import Path

import pytest
import torch

import tandem.kernels
from tandem.bench.step_profile import ATTENTION, LAYERS, LINEARS, PARTS, RUNNER, SAMPLING, SCHEDULER, profile_of
from tandem.config import StackConfig, load_config
from tandem.draft_tree import Draft
from tandem.layers.linear import Linear
from tandem.speculation import DraftRequest, DraftShape, DraftSource
from tests.fakes.tiny_models import VOCAB, random_target
from verifier_service.model_runner import ModelRunner
from verifier_service.profiling.__main__ import profile
from verifier_service.profiling.device_trace import OURS, by_part, part_of, with_device
from verifier_service.profiling.driver import SPINE, Driver


def test_the_parts_of_a_profile_add_up_and_steps_far_from_the_middle_do_not_count() -> None:
    usual = [{LINEARS: 0.010, ATTENTION: 0.002, SAMPLING: 0.001 * i} for i in (1, 1, 3, 3)]
    outliers = [{LINEARS: 0.001}, {LINEARS: 9.0}]
    p = profile_of("block", 1, 8, 64, [*outliers, *usual], (LINEARS, ATTENTION, SAMPLING))
    assert p.parts_ms == {LINEARS: pytest.approx(10.0), ATTENTION: pytest.approx(2.0), SAMPLING: pytest.approx(2.0)}
    assert p.step_ms == pytest.approx(14.0)
    assert p.overhead == pytest.approx(2.0 / 14.0)


@pytest.fixture(params=["off", "on"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> StackConfig:
    """Steps in the shapes they have, and in fixed ones, which decide inside."""
    random_target(tmp_path)
    torch.set_num_threads(1)
    path = tmp_path / "stack.yaml"
    # An n-gram drafter: something to draft with, though the profile stands in for it, and no second model.
    path.write_text(
        "target: .\ndrafter: {draft_source: ngram}\n"
        "verifier: {dtype: float32, device: cpu, threads: 1, kv_blocks: 64, kv_block_tokens: 16, max_context: 96,\n"
        f"           max_running_sequences: 2, max_draft_nodes: 12, graphs: {{mode: {request.param}}}}}\n"
    )
    return load_config(path)


def test_a_profile_covers_plain_block_and_tree_steps_of_the_real_engine(config: StackConfig) -> None:
    """Rows are those asked for, drafts are accepted as far as they are right, and time was spent in every part."""
    before = (Linear.__call__, ModelRunner.run)
    options = argparse.Namespace(clients=[1, 2], context=40, block_nodes=5, tree_nodes=12, accepted=3, steps=4, runs=1)
    measured = profile(config, options)
    kinds = [(p["clients"], p["mode"], p["rows"]) for p in measured["profiles"]]
    assert kinds == [(n, mode, n * rows) for n in (1, 2) for mode, rows in (("off", 1), ("block", 6), ("tree", 13))]
    for p in measured["profiles"]:
        assert list(p["parts_ms"]) == list(PARTS)
        assert p["step_ms"] == pytest.approx(sum(p["parts_ms"].values()))
        assert all(p["parts_ms"][part] > 0 for part in (LINEARS, ATTENTION, LAYERS, SAMPLING, RUNNER, SCHEDULER))
        # 18 tokens: one by one, or four by step.
        assert p["steps"] == pytest.approx(17 if p["mode"] == "off" else 5, abs=2)
    assert (Linear.__call__, ModelRunner.run) == before


def answer(shape: DraftShape, nodes: int) -> Draft:
    """What the profile's drafter says behind position 4 of a text that counts up."""
    driver = Driver(None, VOCAB, [], 0, 1, 2, DraftSource.DFLASH, lambda _: None)  # type: ignore[arg-type]
    driver._texts[0], driver._prompt_of[1] = list(range(100, 115)), 0
    return driver._answer(DraftRequest(1, 0, 4, 104, nodes, shape)).draft


def test_drafts_are_right_as_far_as_they_should_be_and_then_wrong() -> None:
    chain = answer(DraftShape.BLOCK, 6)
    assert chain.is_chain
    assert chain.tokens == [105, 106, 108, 109, 110, 111]
    tree = answer(DraftShape.TREE, 31)
    assert len(tree) == 31
    assert tree.tokens[:2] == [105, 106]
    assert tree.parents[:SPINE] == list(range(SPINE))
    children = list(zip(tree.parents, tree.tokens, strict=True))
    assert len(set(children)) == len(children)
    assert (2, 107) not in children


def test_kernels_are_told_apart_by_their_names() -> None:
    assert part_of("attend") == ATTENTION
    assert part_of("nvjet_tst_128x64_64x8_4x1_v_bz_TNN") == LINEARS
    assert part_of("_product") == LINEARS
    assert part_of("void at::native::reduce_kernel<at::native::ReduceOp<float, at::native::ArgMaxOps<f>>") == SAMPLING
    assert part_of("_rms_norm") == LAYERS
    assert part_of("Memcpy DtoH (Device -> Pinned)") == RUNNER
    assert by_part([("a_gemm", 1.0), ("b_gemm", 2.0), ("_rope", 4.0)]) == {LINEARS: 3.0, LAYERS: 4.0}


def test_the_kernels_that_are_named_are_there() -> None:
    """A kernel that is renamed would be counted as the layers'."""
    sources = (file.read_text() for file in (Path(tandem.kernels.__file__).parent / "triton").glob("*.py"))
    kernels = {name for source in sources for name in re.findall(r"@triton\.jit[^\n]*\ndef (\w+)", source)}
    assert set(OURS) <= kernels


def test_on_a_device_a_step_keeps_its_length_and_what_no_kernel_explains_is_the_runners() -> None:
    step = {LINEARS: 0.5, LAYERS: 2.0, RUNNER: 3.0, SCHEDULER: 1.0}
    parts = with_device(step, {LINEARS: 2.0, ATTENTION: 1.0})
    assert sum(parts.values()) == pytest.approx(6.5)
    assert (parts[LINEARS], parts[ATTENTION], parts[SCHEDULER], parts[RUNNER]) == (2.0, 1.0, 1.0, 2.5)
