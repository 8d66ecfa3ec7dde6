"""What steps ask of the experts: counted as a naive count says, shown in the metrics, written for the planner; and a
placement changes who computes, not what is emitted."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from prometheus_client import CollectorRegistry

from tandem.checkpoints.folder import CheckpointFolder
from tandem.config import StackConfig, load_config
from tandem.errors import StartupError
from tandem.expert_files import ExpertPlacement, read_loads, write_placement
from tandem.expert_placement import balanced, in_order
from tandem.sampling import SamplingParams
from tests.fakes.random_targets import random_architecture
from tests.fakes.thread_ranks import run_ranks
from tests.unit.verifier.steps import BLOCK_TOKENS, CPU, Hand, make_runner, run
from verifier_service import loads_file
from verifier_service.app import build
from verifier_service.expert_load import ExpertLoad
from verifier_service.loads_file import LoadsFile
from verifier_service.models.loading import Placement, load_model
from verifier_service.parallel.ranks import Parallel
from verifier_service.sequence import SequenceRequest
from verifier_service.step_executor import StepExecutor

LAYERS, EXPERTS, PER_TOKEN, EXPERT_BYTES = [1, 2], 16, 4, 3 * 64 * 128 * 4
"""Of the tiny Qwen3-MoE in fp32."""
PROMPT = [(37 * i + 11) % 512 for i in range(20)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    random_architecture(folder, "qwen3-moe", eos_token_id=None)
    return folder


def shuffled(seed: int) -> list[list[int]]:
    ids = np.random.default_rng(seed).permutation(12).tolist()
    return [sorted(ids[rank * 4 : rank * 4 + 4]) for rank in range(3)]


@pytest.mark.parametrize("placement", [None, {5: shuffled(1), 7: shuffled(2)}], ids=["in order", "placed"])
def test_counts_are_those_of_a_naive_count(placement: Placement | None) -> None:
    """Two layers of 12 experts of different size on 3 ranks, two steps of 7 and 1 rows."""
    layers, sizes = [5, 7], [100, 10]
    load = ExpertLoad(layers, 12, sizes, 3, placement=placement)
    random = np.random.default_rng(0)
    totals = {layer: [0] * 12 for layer in layers}
    for rows in (7, 1):
        routing = np.stack([[random.permutation(12)[:2] for _ in range(rows)] for _ in layers])
        step = load.count(routing)
        tokens, read = np.zeros((2, 3), int), np.zeros((2, 3), int)
        for i, layer in enumerate(layers):
            for rank, held in enumerate(placement[layer] if placement else in_order(12, 3)):
                for expert in held:
                    sent = int((routing[i] == expert).sum())
                    totals[layer][expert] += sent
                    tokens[i, rank] += sent
                    read[i, rank] += sizes[i] if sent else 0
        assert step.rank_tokens.tolist() == tokens.sum(0).tolist()
        assert step.touched == sum(len(np.unique(of_layer)) for of_layer in routing) / 2
        assert step.imbalance == pytest.approx(tokens.max(1).sum() / tokens.mean(1).sum())
        assert (step.read_bytes, step.busiest_bytes) == (read.sum(), read.max(1).sum())
    assert load.totals() == totals


def test_ranks_with_a_part_of_every_expert_do_the_same() -> None:
    """Each gets all tokens and reads its part of every touched expert."""
    routing = np.array([[[0, 1], [0, 3]]])
    step = ExpertLoad([0], 4, [10], 2, cut=True).count(routing)
    assert step.rank_tokens.tolist() == [4, 4]
    assert (step.touched, step.imbalance) == (3.0, 1.0)
    assert (step.read_bytes, step.busiest_bytes) == (2 * 3 * 10, 3 * 10)


def config_of(folder: Path, target: Path, **parallel: object) -> StackConfig:
    verifier = {"dtype": "float32", "kv_blocks": 20, "kv_block_tokens": BLOCK_TOKENS, "threads": 1}
    path = folder / "stack.yaml"
    path.write_text(yaml.safe_dump({"target": str(target), "verifier": {**verifier, "parallel": parallel}}))
    return load_config(path)


def test_a_served_answer_is_counted_and_written(tmp_path: Path, target: Path) -> None:
    """A prompt's 20 rows, then a row per further token; what warmed the model up is not counted. A verifier that has
    served nothing leaves an older file alone."""
    registry = CollectorRegistry()
    config = config_of(tmp_path, target, expert_loads="loads.json")
    engine, _, _ = build(config, registry)
    assert engine.experts
    assert config.verifier.parallel.expert_loads
    file = LoadsFile(config.verifier.parallel.expert_loads, "tiny", engine.experts)
    file.save()
    assert not (tmp_path / "loads.json").exists()
    ended = threading.Event()
    request = SequenceRequest("r", PROMPT, len(PROMPT), SamplingParams(temperature=0.0), 6)
    engine.submit(request, lambda emission: ended.set() if emission.finish_reason else None)
    thread = threading.Thread(target=engine.run)
    thread.start()
    assert ended.wait(30)
    engine.stop()
    thread.join(30)

    def value(name: str, **labels: str) -> float:
        found = registry.get_sample_value(f"tandem_{name}", labels)
        assert found is not None, name
        return found

    assert value("expert_tokens_total", rank="0") == (20 + 5) * PER_TOKEN * len(LAYERS)
    assert value("step_tokens_total", kind="prefill") == 1
    assert value("step_tokens_total", kind="decode") == 5
    assert value("expert_bytes_read_total", kind="decode") == 5 * PER_TOKEN * len(LAYERS) * EXPERT_BYTES
    assert value("experts_touched_sum", kind="decode") == 5 * PER_TOKEN
    assert value("expert_imbalance_sum", kind="decode") == 5
    prefill = value("expert_bytes_read_total", kind="prefill")
    assert prefill == value("experts_touched_sum", kind="prefill") * len(LAYERS) * EXPERT_BYTES
    assert prefill == value("expert_busiest_bytes_read_total", kind="prefill")
    file.save()
    written = read_loads(tmp_path / "loads.json")
    assert written.model == "tiny"
    assert {layer: sum(tokens) for layer, tokens in written.layers.items()} == dict.fromkeys(LAYERS, 25 * PER_TOKEN)


async def test_the_file_is_kept_while_serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that cannot be written does not end it."""
    monkeypatch.setattr(loads_file, "_EVERY_SECONDS", 0.01)
    experts = ExpertLoad([0], 2, [1], 1)
    file = LoadsFile(tmp_path / "made later" / "loads.json", "m", experts)
    experts.count(np.array([[[0], [0], [1]]]))
    keeping = asyncio.create_task(file.keep())
    await asyncio.sleep(0.05)
    (tmp_path / "made later").mkdir()
    async with asyncio.timeout(10):
        while not (tmp_path / "made later" / "loads.json").exists():
            await asyncio.sleep(0.01)
    keeping.cancel()
    assert read_loads(tmp_path / "made later" / "loads.json").layers == {0: [2, 1]}


def test_a_planned_placement_emits_what_ranks_emit_without_one(target: Path) -> None:
    """fp32, tolerance 5e-5 on logits of every position, the same greedy ids; planned from the very routing."""
    runner, model = make_runner(target)
    hand = Hand(0, PROMPT)
    load = ExpertLoad(LAYERS, EXPERTS, [EXPERT_BYTES] * 2, 2)
    chosen: list[int] = []
    while len(chosen) < 12:
        chosen += run(runner, [hand.segment()])[0]
        load.count(torch.stack(model.routing).numpy())
    segments = [Hand(0, hand.sequence.tokens).segment().for_ranks()]

    def logits(placement: Placement | None) -> tuple[torch.Tensor, np.ndarray]:
        def work(parallel: Parallel) -> tuple[torch.Tensor, np.ndarray]:
            model = load_model(CheckpointFolder(target), torch.float32, CPU, parallel, placement)
            executor = StepExecutor(model, 257, BLOCK_TOKENS, CPU)
            computed = executor.forward(segments)
            rows = list(range(len(PROMPT) - 1, len(hand.sequence.tokens) - 1))
            found = computed.hidden if parallel.ranks.rank else executor.logits(computed.hidden, rows)
            return found, torch.stack(computed.routing).numpy()

        return run_ranks(2, split_attention=False, cut_experts=False, work=work)[0]

    placement = {layer: balanced(tokens, 2) for layer, tokens in load.totals().items()}
    assert placement != {layer: in_order(EXPERTS, 2) for layer in LAYERS}
    plain, routing = logits(None)
    placed, _ = logits(placement)
    torch.testing.assert_close(placed, plain, atol=5e-5, rtol=5e-5)
    assert placed.argmax(-1).tolist() == plain.argmax(-1).tolist() == chosen

    def imbalance(where: Placement | None) -> float:
        return ExpertLoad(LAYERS, EXPERTS, [1, 1], 2, placement=where).count(routing).imbalance

    assert imbalance(placement) < 1.02 < imbalance(None)


@pytest.mark.parametrize(
    ("kind", "parallel", "said"),
    [
        ("qwen3-moe", {"placement": "p.json"}, "p.json: ranks: is for 2, but verifier.parallel.ep is 1"),
        ("qwen3-moe", {"placement": "none.json"}, "verifier.parallel.placement: .*no file .*none.json"),
        ("qwen3-moe", {"ep": 2, "experts": "cut", "placement": "p.json"}, "placement does not apply to experts: cut"),
        ("qwen3-moe", {"expert_loads": "nowhere/x.json"}, "verifier.parallel.expert_loads: .*no folder .*nowhere"),
        ("qwen3", {"placement": "p.json"}, "verifier.parallel.placement: .* has no mixture of experts"),
        ("qwen3", {"expert_loads": "x.json"}, "verifier.parallel.expert_loads: .* has no mixture of experts"),
    ],
    ids=["ranks", "no file", "cut", "no folder", "placement of none", "loads of none"],
)
def test_what_does_not_fit_ends_the_start(
    tmp_path: Path, target: Path, kind: str, parallel: dict[str, Any], said: str
) -> None:
    if kind == "qwen3":
        target = tmp_path / "dense"
        random_architecture(target, kind)
    placed = {layer: in_order(EXPERTS, 2) for layer in LAYERS}
    write_placement(tmp_path / "p.json", ExpertPlacement(model="m", ranks=2, layers=placed))
    with pytest.raises(StartupError, match=said):
        build(config_of(tmp_path, target, **parallel), CollectorRegistry())
