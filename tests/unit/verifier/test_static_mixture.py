"""A mixture of experts in steps of fixed shape says what it says otherwise, bit for bit. Tiny targets in fp32."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tandem.checkpoints.folder import CheckpointFolder
from tandem.checkpoints.weights import WeightReader
from tests.fakes.random_targets import random_architecture
from verifier_service.models.architectures import read_config
from verifier_service.models.moe import MixtureOfExperts
from verifier_service.parallel.ranks import ALONE

HIDDEN = 128


@pytest.fixture(scope="module", params=["qwen3-moe", "deepseek-v3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    random_architecture(path, request.param)
    return path


def _mixture(path: Path, held: Sequence[int]) -> MixtureOfExperts:
    checkpoint = CheckpointFolder(path)
    config = read_config(checkpoint)
    assert config.mixture
    reader = WeightReader(checkpoint, torch.float32, torch.device("cpu"))
    return MixtureOfExperts(config.mixture, HIDDEN, reader, "model.layers.1.mlp.", held, ALONE)


def _padding(rows: int, real_rows: int) -> torch.Tensor:
    return torch.arange(rows)[:, None] >= real_rows


@pytest.mark.parametrize("held", [range(16), [1, 5, 6, 15]], ids=["all held", "some held"])
@pytest.mark.parametrize(("rows", "real_rows"), [(4, 1), (8, 8), (16, 11)])
def test_real_rows_have_the_bits_of_a_step_of_any_shape(
    folder: Path, held: Sequence[int], rows: int, real_rows: int
) -> None:
    mixture = _mixture(folder, held)
    x, residual = torch.randn(2, rows, HIDDEN, generator=torch.Generator().manual_seed(rows)).unbind()
    expected = mixture.added_to(residual, x, real_rows)[:real_rows]
    routed = mixture.routed.clone()
    found = mixture.added_to(residual, x, rows, _padding(rows, real_rows))
    assert torch.equal(found[:real_rows], expected)
    assert torch.equal(mixture.routed[:real_rows], routed)


def test_padding_rows_wake_no_routed_expert(folder: Path) -> None:
    """What is added to them is what the shared experts say of them, which do not depend on who is real."""
    mixture = _mixture(folder, range(16))
    x, residual = torch.randn(2, 8, HIDDEN, generator=torch.Generator().manual_seed(1)).unbind()
    padded = mixture.added_to(residual, x, 8, _padding(8, 3))
    nobody = mixture.added_to(residual, x, 8, _padding(8, 0))
    everybody = mixture.added_to(residual, x, 8, _padding(8, 8))
    assert torch.equal(padded[3:], nobody[3:])
    assert torch.equal(padded[:3], everybody[:3])
    assert not torch.equal(everybody[3:], nobody[3:])


def test_steps_of_fixed_shape_say_in_one_place_where_rows_went(folder: Path) -> None:
    """The largest bucket is captured first, and its memory holds those of all others."""
    mixture = _mixture(folder, range(16))
    places = set()
    for rows in (16, 4, 8, 16):
        mixture.added_to(torch.zeros(rows, HIDDEN), torch.randn(rows, HIDDEN), rows, _padding(rows, rows))
        assert mixture.routed.shape == (rows, 4)
        places.add(mixture.routed.data_ptr())
    assert len(places) == 1
