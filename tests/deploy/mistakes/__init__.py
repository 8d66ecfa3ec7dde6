"""Mistakes to plant in trees that are right."""

from tests.deploy.mistakes import around_pods, in_pods, in_tls
from tests.deploy.mistakes.planting import Mistake

MISTAKES: dict[str, Mistake] = {**in_pods.MISTAKES, **around_pods.MISTAKES, **in_tls.MISTAKES}
"""By what is wrong."""
