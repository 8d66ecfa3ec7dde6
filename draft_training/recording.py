"""The target's own answers to given prompts, with its hidden states: what drafts are measured against."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from draft_training.acceptance import Answer
from draft_training.slot_decoder import SlotDecoder
from tandem.layers.argmax import argmax_rows
from tandem.sampling import SamplingParams
from verifier_service.models.target_model import TargetModel
from verifier_service.sampler import sample

_MOST_AT_ONCE = 64


@torch.inference_mode()
def record_answers(
    model: TargetModel,
    prompts: Sequence[tuple[str, list[int]]],
    tap_layers: tuple[int, ...],
    eos: frozenset[int],
    max_tokens: int,
    sampling: SamplingParams,
    device: torch.device,
) -> list[Answer]:
    """Answers of up to max_tokens to (group, prompt ids), sampled as the verifier samples: prompt i with seed + i."""
    answers: list[Answer] = []
    for start in range(0, len(prompts), _MOST_AT_ONCE):
        batch = prompts[start : start + _MOST_AT_ONCE]
        samplings = [replace(sampling, seed=sampling.seed + start + i) for i in range(len(batch))]
        answers += _record(model, batch, tap_layers, eos, max_tokens, samplings, device)
    return answers


def _record(
    model: TargetModel,
    prompts: Sequence[tuple[str, list[int]]],
    tap_layers: tuple[int, ...],
    eos: frozenset[int],
    max_tokens: int,
    samplings: Sequence[SamplingParams],
    device: torch.device,
) -> list[Answer]:
    longest = max(len(ids) for _, ids in prompts) + max_tokens
    decoder = SlotDecoder(model, len(prompts), longest, tap_layers, device)
    taps = torch.zeros(len(prompts), longest, decoder.width, dtype=torch.bfloat16)
    texts = [list(ids) for _, ids in prompts]
    fed = [len(text) - 1 for text in texts]
    for i, text in enumerate(texts):
        if fed[i]:
            prefix = decoder.prefix(text[:-1])
            decoder.begin_with(i, prefix)
            taps[i, : fed[i]] = prefix.taps.to("cpu", torch.bfloat16)
    live = set(range(len(prompts)))
    rows = torch.arange(len(prompts))
    while live:
        step = decoder.step([text[n] for text, n in zip(texts, fed, strict=True)], fed)
        taps[rows, torch.tensor(fed)] = step.taps.to("cpu", torch.bfloat16)
        greedy = argmax_rows(step.logits).tolist()
        for i in sorted(live):
            fed[i] += 1
            params = samplings[i]
            token = greedy[i] if params.greedy else sample(step.logits[i], params, len(texts[i]))
            texts[i].append(token)
            if token in eos or len(texts[i]) - len(prompts[i][1]) == max_tokens:
                live.remove(i)
                # The slot goes on with its last token again and again, which touches nothing that is kept.
    return [
        Answer(text, len(ids), group, taps[i, : len(text) - 1].clone())
        for i, ((group, ids), text) in enumerate(zip(prompts, texts, strict=True))
    ]
