"""Fixtures of the tests of draft_training."""

import pytest

from tests.unit.training.worlds import World, chatting_target


@pytest.fixture(scope="package")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A target that nobody changes."""
    folder = tmp_path_factory.mktemp("world") / "target"
    return folder, chatting_target(folder)
