"""Each check catches what it is for: a mistake is planted in a tree that is right, and one named check must say so."""

import copy

import pytest

from tests.deploy.checks import CHECKS
from tests.deploy.manifests import render
from tests.deploy.mistakes import MISTAKES


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_caught(mistake: str) -> None:
    tree, plant, check, says = MISTAKES[mistake]
    objects = copy.deepcopy(render(tree))
    assert check(objects) == []
    plant(objects)
    assert any(says in problem for problem in check(objects)), check(objects)


def test_every_check_catches_something() -> None:
    """A check that no mistake needs could be one that cannot fail."""
    assert {check.__name__ for _, _, check, _ in MISTAKES.values()} == {check.__name__ for check in CHECKS}
