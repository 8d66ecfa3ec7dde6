"""What a target's generation_config.json means for unset sampling fields."""

import json
from pathlib import Path

import pytest

from gateway.target_files import read_default_sampling
from tandem.errors import StartupError
from tandem.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, GREEDY),
        ({}, GREEDY),
        ({"temperature": 0.6, "top_p": 0.5}, SamplingParams(temperature=0.0, top_p=0.5)),
        ({"do_sample": False, "temperature": 0.6}, GREEDY),
        ({"do_sample": True}, SamplingParams(temperature=1.0)),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1},
            SamplingParams(temperature=0.6, top_p=0.95, top_k=20, min_p=0.1),
        ),
        ({"do_sample": True, "temperature": None, "top_k": None}, SamplingParams(temperature=1.0)),
    ],
)
def test_defaults(tmp_path: Path, config: dict[str, object] | None, expected: SamplingParams) -> None:
    if config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert read_default_sampling(tmp_path) == expected


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"top_p": "high"}', "top_p must be a number, is 'high'"),
        ('{"top_p": 7}', r"top_p: must be in \(0, 1\], is 7"),
        ("[]", "must hold a JSON object"),
        ("{", "not JSON"),
    ],
)
def test_what_is_wrong_is_named_with_its_file(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(StartupError, match=rf"generation_config.json: .*{says}"):
        read_default_sampling(tmp_path)
