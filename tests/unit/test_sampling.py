"""Sampling: parameters, position-keyed randomness, filters against transformers, distribution by chi-square."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tandem.position_random import position_uniforms
from tandem.sampling import SamplingParams
from verifier_service.sampler import _filter, log_prob, sample


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31), st.integers(1, 9))
def test_a_positions_random_number_depends_on_seed_and_position_only(seed: int, position: int, count: int) -> None:
    together = position_uniforms(seed, position, count)
    alone = [position_uniforms(seed, position + i, 1)[0] for i in range(count)]
    assert together.tolist() == alone
    assert all(0 <= u < 1 for u in alone)


def test_positions_and_seeds_give_independent_uniforms() -> None:
    draws = np.concatenate([position_uniforms(seed, 0, 2000) for seed in range(5)])
    assert stats.kstest(draws, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.05
    assert len(set(draws)) == len(draws)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": -0.5}, "min_p"),
        ({"min_p": math.nan}, "min_p"),
        ({"seed": 2**64}, "seed"),
    ],
)
def test_a_wrong_parameter_is_named(values: dict[str, float], field: str) -> None:
    assert [v.field for v in SamplingParams(**values).violations()] == [f"sampling.{field}"]  # type: ignore[arg-type]


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.floats(0.1, 3),
    top_k=st.sampled_from([0, 1, 3, 17, 200]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)
def test_filters_keep_what_transformers_keeps(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Oracle: transformers' warpers in the documented order temperature, top_k, top_p, min_p."""
    logits = torch.randn(1, 200, generator=torch.Generator().manual_seed(seed)) * 3
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    if min_p:
        expected = MinPLogitsWarper(min_p)(None, expected)
    kept = _filter(torch.softmax(logits[0] / temperature, -1), params)
    ids = list(range(200)) if kept is None else kept.tolist()
    assert ids == (expected[0] > -math.inf).nonzero()[:, 0].tolist()


def test_top_p_beyond_the_candidates_falls_back_to_all_tokens() -> None:
    """A flat distribution over 5,000 tokens: top_p 0.9 keeps 4,500, more than the candidates looked at first."""
    kept = _filter(torch.full((5000,), 1 / 5000), SamplingParams(top_p=0.9))
    assert kept is not None
    assert abs(len(kept) - 4500) <= 1


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.3, top_k=9),
        SamplingParams(temperature=1.0, top_p=0.8),
        SamplingParams(temperature=1.0, min_p=0.1),
    ],
)
def test_samples_follow_the_filtered_distribution(params: SamplingParams) -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(3)) * 2
    probs = torch.softmax(logits / params.temperature, -1).double()
    kept = _filter(probs.float(), params)
    if kept is not None:
        mask = torch.zeros(40, dtype=torch.bool).index_fill_(0, kept, True)
        probs = torch.where(mask, probs, 0.0)
    probs /= probs.sum()
    draws = 4000
    counts = np.zeros(40)
    for position in range(draws):
        counts[sample(logits, SamplingParams(**{**vars(params), "seed": 11}), position)] += 1
    expected = probs.numpy() * draws
    assert counts[expected == 0].sum() == 0
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    keep = wanted > 0
    assert stats.chisquare(observed[keep], wanted[keep] * observed[keep].sum() / wanted[keep].sum()).pvalue > 1e-3


def test_temperature_zero_takes_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([0.0, 2.0, 2.0, 1.0])
    assert sample(logits, SamplingParams(temperature=0.0), 5) == 1


def test_log_prob_is_the_unfiltered_one() -> None:
    logits = torch.randn(50)
    assert log_prob(logits, 7) == pytest.approx(float(torch.log_softmax(logits, -1)[7]), abs=1e-6)
