"""Measuring a draft model's folder against a target's folder."""

from collections.abc import Sequence
from pathlib import Path

import torch

from draft_training.acceptance import DflashSource
from draft_training.measurement import Measured, measure_sources, with_ngram
from draft_training.prompts import read_prompts
from draft_training.recording import record_answers
from gateway.tokenizer import TargetTokenizer
from tandem.checkpoints.folder import CheckpointFolder
from tandem.checkpoints.model_json import eos_token_ids
from tandem.errors import StartupError
from tandem.sampling import SamplingParams
from tandem.torch_setup import pick_device
from verifier_service.models.loading import load_model


def evaluate_folder(
    target: Path,
    draft_model: Path,
    prompts: Path,
    temperature: float,
    seed: int,
    trees: Sequence[int],
    max_tokens: int,
    dtype: torch.dtype,
) -> list[Measured]:
    """Acceptance on the target's answers to the prompts; StartupError for what does not fit together."""
    asked = list(read_prompts(prompts, TargetTokenizer.load(target)))
    if not asked:
        raise StartupError(f"{prompts}: holds no prompts")
    device = pick_device("auto", "device")
    model = load_model(CheckpointFolder(target), dtype, device)
    source = DflashSource(draft_model, target, model.config, dtype, device)
    answers = record_answers(
        model,
        asked,
        source.config.target_layer_ids,
        frozenset(eos_token_ids(target)),
        max_tokens,
        SamplingParams(temperature=temperature, seed=seed),
        device,
    )
    return measure_sources(with_ngram(source), answers, source.config.block_size, trees)
