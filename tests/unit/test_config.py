"""A wrong config is a start-up error that names the file and the key; a right one resolves its paths."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.config import load_config, with_ranks
from tandem.errors import StartupError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    return tmp_path


def write(folder: Path, data: Any) -> Path:
    path = folder / "stack.yaml"
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
    return path


def test_paths_are_relative_to_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(folder, {"target": "target", "draft_model": "./draft", "verifier": {"kv_blocks": 7}})
    monkeypatch.chdir("/")
    config = load_config(path)
    assert (config.target, config.draft_model) == (folder / "target", folder / "draft")
    assert config.verifier.kv_blocks == 7
    assert config.gateway.verifier == config.verifier.listen == config.drafter.verifier


def test_a_bare_off_is_the_mode(folder: Path) -> None:
    """YAML reads it as false."""
    path = write(folder, "target: target\nverifier:\n  speculation_mode: off\n")
    assert load_config(path).verifier.speculation_mode == "off"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, ["target", "required"]),
        ({"target": "nowhere"}, ["target", "no config.json in", "nowhere"]),
        ({"target": "target", "verifer": {}}, ["verifer", "unknown key"]),
        ({"target": "target", "verifier": {"kv_block": 3}}, ["verifier.kv_block", "unknown key"]),
        ({"target": "target", "verifier": {"kv_blocks": 0}}, ["verifier.kv_blocks", "greater than or equal to 2"]),
        ({"target": "target", "verifier": {"dtype": "int3"}}, ["verifier.dtype", "bfloat16", "float32"]),
        ({"target": "target", "verifier": {"max_draft_nodes": 257}}, ["verifier.max_draft_nodes", "256"]),
        (
            {"target": "target", "verifier": {"parallel": {"ep": 8, "tp": 2}}},
            ["verifier.parallel", "1 or ep", "8", "2"],
        ),
        ({"target": "target", "verifier": {"speculation_mode": "on"}}, ["speculation_mode", "'tree' or 'auto'"]),
        ({"target": "target", "gateway": {"listen": "7600"}}, ["gateway.listen", "HOST:PORT"]),
        ({"target": "target", "gateway": {"listen": "a:70000"}}, ["gateway.listen", "HOST:PORT"]),
        ({"target": "target", "verifier": {"speculation_mode": "block"}}, ["speculation_mode", "needs draft_model"]),
        ({"target": "target", "drafter": {"draft_source": "eagle"}}, ["drafter.draft_source", "dflash", "ngram"]),
        ({"target": "target", "drafter": {"ngram_max": 4}}, ["drafter.ngram_max", "draft_source dflash"]),
        ({"target": "target", "drafter": {"ngram_block_size": 9}}, ["drafter.ngram_block_size", "draft_source dflash"]),
        (
            {"target": "target", "drafter": {"draft_source": "ngram", "dtype": "float32"}},
            ["drafter.dtype", "draft_source ngram"],
        ),
        (
            {"target": "target", "drafter": {"draft_source": "ngram", "ngram_max": 3, "ngram_min": 4}},
            ["drafter.ngram_min", "at most ngram_max 3", "is 4"],
        ),
        ("target: [", ["not YAML"]),
        ("- a\n- b", ["must be a mapping"]),
    ],
)
def test_a_wrong_key_is_named(folder: Path, data: Any, words: list[str]) -> None:
    path = write(folder, data)
    with pytest.raises(StartupError) as error:
        load_config(path)
    assert str(path) in str(error.value)
    assert all(word in str(error.value) for word in words)


def test_every_wrong_key_has_a_line(folder: Path) -> None:
    path = write(folder, {"target": "target", "gateway": {"x": 1}, "drafter": {"threads": 0}})
    with pytest.raises(StartupError) as error:
        load_config(path)
    assert len(str(error.value).splitlines()) == 2


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"nowhere\.yaml: No such file"):
        load_config(tmp_path / "nowhere.yaml")


def test_the_n_gram_source_needs_no_draft_model(folder: Path) -> None:
    """Speculation can be asked for; without either source it cannot."""
    data = {"target": "target", "verifier": {"speculation_mode": "block"}, "drafter": {"draft_source": "ngram"}}
    assert load_config(write(folder, data)).speculates
    assert not load_config(write(folder, {"target": "target"})).speculates


def test_the_n_gram_demo_config_is_valid_but_for_its_target(tmp_path: Path) -> None:
    data = yaml.safe_load((Path(__file__).parents[2] / "configs" / "demo-ngram.yaml").read_text())
    (tmp_path / "config.json").write_text("{}")
    config = load_config(write(tmp_path, {**data, "target": str(tmp_path)}))
    assert config.speculates
    assert config.draft_model is None


def test_the_demo_config_is_valid_but_for_its_target(tmp_path: Path) -> None:
    """The demo target is prepared, not shipped."""
    source = Path(__file__).parents[2] / "configs" / "demo.yaml"
    data = yaml.safe_load(source.read_text())
    assert (source.parent / data["draft_model"] / "config.json").is_file()
    (tmp_path / "config.json").write_text("{}")
    data["target"] = data["draft_model"] = str(tmp_path)
    assert load_config(write(tmp_path, data)).gateway.reflection


def test_the_command_lines_ranks_take_the_files_place(folder: Path) -> None:
    """What they do not name stays; what does not fit is refused."""
    path = write(folder, {"target": "target", "verifier": {"parallel": {"ep": 2, "tp": 2, "experts": "cut"}}})
    config = load_config(path)
    parallel = with_ranks(config, 8, 8).verifier.parallel
    assert (parallel.ep, parallel.tp, parallel.experts) == (8, 8, "cut")
    assert with_ranks(config, None, None) == config
    with pytest.raises(StartupError, match=r"--ep, --tp: .*1 or ep, which is 8; is 2"):
        with_ranks(config, 8, None)


TLS = {"certificate": "tls/tls.crt", "key": "tls/tls.key"}


def test_links_to_certificates_are_kept(folder: Path) -> None:
    """A mounted Secret is links, which lead elsewhere when it is replaced. It need not be there when a config loads."""
    (folder / "tls").symlink_to("2026-11-30")
    data = {"target": "target", "gateway": {"tls": TLS, "health_listen": "127.0.0.1:1"}}
    tls = load_config(write(folder, data)).gateway.tls
    assert tls
    assert (tls.certificate, tls.key) == (folder / "tls/tls.crt", folder / "tls/tls.key")


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"gateway": {"tls": TLS}}, ["gateway", "health_listen"]),
        ({"verifier": {"tls": {**TLS, "ca": "x"}, "health_listen": "a:1"}}, ["verifier.tls.ca", "unknown key"]),
        ({"gateway": {"verifier_tls": {"certificate": "x"}}}, ["gateway.verifier_tls.ca", "required"]),
        ({"drafter": {"verifier_tls": {"ca": "x", "key": "y"}}}, ["drafter.verifier_tls", "both"]),
        ({"drafter": {"tls": TLS}}, ["drafter.tls", "unknown key"]),
    ],
)
def test_half_a_tls_section_is_refused(folder: Path, section: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(StartupError) as caught:
        load_config(write(folder, {"target": "target", **section}))
    assert all(word in str(caught.value) for word in words)


def test_later_files_add_keys_and_replace_them_at_any_depth(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    first = write(folder, {"target": "target", "verifier": {"kv_blocks": 7, "parallel": {"ep": 2}}})
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    second = write(elsewhere, {"verifier": {"kv_blocks": 9}, "drafter": {"draft_source": "ngram"}})
    config = load_config(first, second)
    assert (config.verifier.kv_blocks, config.verifier.parallel.ep) == (9, 2)
    assert config.drafter.draft_source == "ngram"
    assert config.target == folder / "target"
    wrong = write(elsewhere, {"verifier": {"kv_block": 9}})
    with pytest.raises(StartupError, match=f"{first} \\+ {wrong}: verifier.kv_block: unknown key"):
        load_config(first, wrong)
