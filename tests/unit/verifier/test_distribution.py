"""What is sampled follows the target's distribution, with and without speculation (chi-square, tiny random target)."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from tandem.draft_tree import Draft
from tandem.sampling import SamplingParams
from tests.fakes.tiny_models import random_target
from tests.unit.verifier.steps import Hand, make_runner, run

PROMPT = [5, 99, 300, 17, 42, 8]
TOP_K = 5
TEMPERATURE = 1.5
DRAWS = 1500


def exact_pairs(folder: Path) -> tuple[dict[tuple[int, int], float], list[int]]:
    """Joint distribution of the first two tokens by transformers' logits, and the first tokens, the likeliest first."""
    oracle = random_target(folder)

    def next_probs(ids: list[int]) -> dict[int, float]:
        with torch.inference_mode():
            values, tokens = oracle(torch.tensor([ids])).logits[0, -1].topk(TOP_K)
        probs = torch.softmax(values.double() / TEMPERATURE, -1)
        return dict(zip(tokens.tolist(), probs.tolist(), strict=True))

    first = next_probs(PROMPT)
    joint = {(a, b): p * q for a, p in first.items() for b, q in next_probs([*PROMPT, a]).items()}
    return joint, list(first)


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["none", "likely", "unlikely", "tree"])
def test_pairs_of_sampled_tokens_follow_the_targets_joint_distribution(tmp_path: Path, draft: str) -> None:
    joint, first = exact_pairs(tmp_path)
    runner, _ = make_runner(tmp_path)
    hand = Hand(0, PROMPT)
    run(runner, [hand.segment(len(PROMPT) - 1)])
    under_second = [b for a, b in joint if a == first[1]][:2]
    branching = Draft([*first[:3], *under_second], [0, 0, 0, 2, 2], [0.0] * 5)
    nodes = {"none": None, "likely": [first[0], 3, 4], "unlikely": [0, 1, 2], "tree": branching}[draft]
    seen: Counter[tuple[int, int]] = Counter()
    accepted = 0
    for seed in range(DRAWS):
        params = SamplingParams(temperature=TEMPERATURE, top_k=TOP_K, seed=seed)
        object.__setattr__(hand.sequence.request, "sampling", params)
        hand.sequence.tokens[len(PROMPT) :] = []
        hand.sequence.committed = len(PROMPT) - 1
        chosen = run(runner, [hand.segment(draft=nodes)])[0]
        accepted += len(chosen) - 1
        if len(chosen) == 1:
            chosen += run(runner, [hand.segment(draft=nodes)])[0]
        seen[(chosen[0], chosen[1])] += 1
    assert (accepted > DRAWS / 10) == (draft in ("likely", "tree"))
    assert set(seen) <= set(joint)
    expected = np.array(list(joint.values())) * DRAWS
    observed = np.array([seen[pair] for pair in joint])
    rare = expected < 5
    observed, expected = (np.append(x[~rare], x[rare].sum()) for x in (observed, expected))
    keep = expected > 0
    assert stats.chisquare(observed[keep], expected[keep]).pvalue > 1e-3
