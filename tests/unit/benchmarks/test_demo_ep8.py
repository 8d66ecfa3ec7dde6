"""What `make demo-ep8` compares and reads, without a model."""

from pathlib import Path

import yaml
from prometheus_client import CollectorRegistry, Counter

from benchmarks.demo_ep8 import EXPERT_TOKENS, dense_config, differing, expert_loads
from tandem.bench.stats import Pass, Request
from tandem.config import load_config
from tandem.metrics import serve_metrics
from tests.fakes.ports import free_port

CONFIG = Path(__file__).parents[3] / "configs" / "demo-ep8.yaml"


def one_pass(mode: str, run: int, *answers: tuple[int, ...]) -> Pass:
    requests = [Request(i, f"p{i}", "chat", 0.0, 1.0, (), ids, 0, 0, 0, 0, (), ()) for i, ids in enumerate(answers)]
    return Pass(mode, 1, run, tuple(requests))


def test_the_config_is_valid_but_for_its_targets(tmp_path: Path) -> None:
    """And the dense target's stack differs from it by nothing but target, ranks and drafts."""
    data = yaml.safe_load(CONFIG.read_text())
    assert (CONFIG.parent / data["draft_model"] / "config.json").is_file()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "ep8.yaml").write_text(yaml.safe_dump(data | {"target": str(tmp_path), "draft_model": str(tmp_path)}))
    config = load_config(tmp_path / "ep8.yaml")
    assert (config.verifier.parallel.ep, config.verifier.parallel.tp) == (8, 1)
    dense = load_config(dense_config(tmp_path / "ep8.yaml", tmp_path, tmp_path))
    assert not dense.speculates
    assert dense.verifier.parallel.ep == 1
    assert (dense.gateway, dense.verifier.dtype, dense.verifier.kv_blocks) == (
        config.gateway,
        config.verifier.dtype,
        config.verifier.kv_blocks,
    )


def test_an_answer_with_other_ids_is_named_under_its_mode() -> None:
    dense = [one_pass("off", 1, (1, 2), (3,))]
    mixture = [one_pass("off", 1, (1, 2), (3,)), one_pass("block", 1, (1, 2), (4,)), one_pass("block", 2, (1,), (3,))]
    assert differing(dense, mixture) == {"off": [], "block": ["p1", "p0"]}


def test_loads_are_summed_over_what_else_a_rank_is_counted_by() -> None:
    registry = CollectorRegistry()
    address = f"127.0.0.1:{free_port()}"
    serve_metrics(address, "verifier.metrics_listen", registry)
    assert expert_loads(address) == {}, "a verifier that does not count them"
    tokens = Counter(EXPERT_TOKENS, "Tokens", ("rank", "layer"), registry=registry)
    for rank, layer, count in ((0, 0, 5), (0, 1, 2), (1, 0, 3)):
        tokens.labels(rank, layer).inc(count)
    assert expert_loads(address) == {0: 7.0, 1: 3.0}
    assert expert_loads(None) == {}
