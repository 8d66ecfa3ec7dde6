"""Every tree of k8s/ renders, and every check holds for it."""

import pytest

from tests.deploy.checks import CHECKS, Check
from tests.deploy.manifests import COMPONENTS, SERVING, of_kind, render

TREES = ["base", "model-store", *SERVING, *(f"base+{component}" for component in COMPONENTS)]


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_tree_holds(tree: str, check: Check) -> None:
    """The invariant is the check's docstring."""
    assert check(render(tree)) == []


@pytest.mark.parametrize("overlay", SERVING)
def test_serving_overlays_are_closed_to_the_network(overlay: str) -> None:
    """The call graph is enforced, not only correct where it is."""
    assert of_kind(render(overlay), "NetworkPolicy")


def test_every_component_is_in_an_overlay() -> None:
    """So that the checks see components as they are used: together with others."""
    used = {(o["kind"], o["metadata"]["name"]) for tree in ["model-store", *SERVING] for o in render(tree)}
    for component in COMPONENTS:
        added = {(o["kind"], o["metadata"]["name"]) for o in render(f"base+{component}")}
        added -= {(o["kind"], o["metadata"]["name"]) for o in render("base")}
        assert added, component
        assert {a for a in added if a[0] != "ConfigMap"} <= used, component
