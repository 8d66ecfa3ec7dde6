"""A training run from nothing to a draft model: data, held-out answers, training, export, card."""

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from draft_training.acceptance import Answer, DflashSource
from draft_training.card import TrainingRecord, render
from draft_training.config import TrainConfig
from draft_training.conversations import SUFFIX, Conversation, read_folder, read_shard, write_shard
from draft_training.curve import Evaluation, read_curve
from draft_training.measurement import Measured, measure_sources, with_ngram
from draft_training.prompts import read_prompts
from draft_training.recording import record_answers
from draft_training.taps import SUFFIX as TAPS_SUFFIX
from draft_training.taps import TapFile, TapShape, TapWriter
from draft_training.target import load_target, writing_folder
from draft_training.trainer import Trainer
from draft_training.write_data import import_seed_shards
from gateway.tokenizer import TargetTokenizer
from tandem.bench.machine import machine_line
from tandem.checkpoints.folder import CheckpointFolder
from tandem.checkpoints.model_json import eos_token_ids
from tandem.errors import StartupError
from tandem.sampling import SamplingParams
from tandem.torch_setup import pick_device, set_threads
from verifier_service.models.architectures import read_config
from verifier_service.models.target_config import TargetConfig

CARD_TREES = (8, 16, 32, 64)
_DATA_SHARE = 0.4
"""Of a run's minutes, where data is missing: what is spent on writing it."""


@dataclass(frozen=True)
class DataState:
    """What a run's folder holds."""

    conversations: int
    answer_tokens: int


def check(config: TrainConfig) -> None:
    """StartupError naming the first key that does not suit the target."""
    target, draft, data = _target_config(config), config.draft, config.data
    for key, value, limit in (
        ("draft.target_layer_ids", max(draft.target_layer_ids), target.layers - 1),
        ("draft.mask_token_id", draft.mask_token_id, target.vocab_size - 1),
        ("draft.draft_vocab_size", draft.draft_vocab_size or 0, target.vocab_size),
        (
            "data.max_prompt_tokens + max_answer_tokens",
            data.max_prompt_tokens + data.max_answer_tokens,
            target.max_positions,
        ),
    ):
        if value > limit:
            raise StartupError(f"{key}: must be at most {limit} for this target, is {value}")
    longest = max(config.training.blocks, default=0)
    if longest > draft.block_size:
        raise StartupError(f"training.blocks: must be at most draft.block_size, {draft.block_size}, one is {longest}")
    writing_folder(config)
    if min(draft.target_layer_ids) < 0 or len(set(draft.target_layer_ids)) < len(draft.target_layer_ids):
        raise StartupError("draft.target_layer_ids: must be distinct layers, 0 for the first")


def data_state(config: TrainConfig) -> DataState:
    """Complete shards, with or without hidden states."""
    found = [c for _, shard in read_folder(config.run / "data") for c in shard]
    return DataState(len(found), sum(c.answer_tokens for c in found))


def write_data(config: TrainConfig, config_file: Path, stop: Callable[[], bool], minutes: float | None) -> None:
    """Run the writers until there is as much data as asked, until stop(), or for some minutes."""
    import_seed_shards(config)
    deadline = time.monotonic() + 60 * minutes if minutes is not None else None
    command = [sys.executable, "-m", "draft_training.write_data", "--config", str(config_file), "--writer"]
    writers = [subprocess.Popen([*command, str(i)]) for i in range(config.data.writers)]
    try:
        while any(w.poll() is None for w in writers) and not any(w.poll() for w in writers):
            if stop() or (deadline is not None and time.monotonic() >= deadline):
                break
            time.sleep(0.2)
    finally:
        for writer in writers:
            if writer.poll() is None:
                writer.send_signal(signal.SIGTERM)
        for writer in writers:
            writer.wait()
    # One that was told to end before it could listen ends by the signal.
    if not stop() and any(w.returncode not in (0, -signal.SIGTERM) for w in writers):
        raise StartupError("a data writer failed; its reason stands above")


def held_out_answers(config: TrainConfig, device: torch.device) -> list[Answer]:
    """The target's answers to the held-out prompts, at temperature 0; recorded once per run."""
    folder = config.run / "held_out"
    shape = TapShape(len(config.draft.target_layer_ids), _target_config(config).hidden_size)
    conversations_file, taps_file = folder / f"answers{SUFFIX}", folder / f"answers{TAPS_SUFFIX}"
    if not conversations_file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        _record(config, conversations_file, taps_file, device)
    conversations = read_shard(conversations_file)
    taps = TapFile(taps_file, conversations, shape)
    return [Answer(c.ids, c.answer_start, c.kind, taps.rows(i)) for i, c in enumerate(conversations)]


def train(
    config: TrainConfig, stop: Callable[[], bool], report: Callable[[Evaluation], None]
) -> tuple[Trainer, list[Answer]]:
    """Train until the steps are done or stop(); exports to `output` at the end."""
    set_threads(config.threads)
    # Gradients of improbable tokens are tiny; as denormal numbers they would slow products down a hundredfold.
    torch.set_flush_denormal(True)
    try:
        device = pick_device(config.device, "device")
        held_out = held_out_answers(config, device)
        trainer = Trainer(config, held_out, device)
        trainer.run(stop, report)
        trainer.export(config.output)
        return trainer, held_out
    finally:
        torch.set_flush_denormal(False)


def measure_output(config: TrainConfig, answers: list[Answer], device: torch.device) -> list[Measured]:
    """The exported model against the n-gram drafter."""
    source = DflashSource(config.output, config.target, _target_config(config), torch.float32, device)
    return measure_sources(with_ngram(source), answers, config.draft.block_size, CARD_TREES)


def write_card(config: TrainConfig, trainer: Trainer, measured: list[Measured]) -> None:
    """README.md beside the exported model."""
    conversations: list[Conversation] = [c for _, shard in read_folder(config.run / "data") for c in shard]
    tokens = sum(c.answer_tokens for c in conversations)
    by_kind: Counter[str] = Counter()
    for conversation in conversations:
        by_kind[conversation.kind] += conversation.answer_tokens
    record = TrainingRecord(
        target=config.target.name,
        architecture="DFlash2" if config.draft.dflash2 else "DFlash",
        parameters=sum(p.numel() for p in trainer.network.parameters()),
        taps=config.draft.target_layer_ids,
        conversations=len(conversations),
        answer_tokens=tokens,
        greedy_share=sum(c.answer_tokens for c in conversations if c.greedy) / max(1, tokens),
        tokens_by_kind=dict(by_kind.most_common()),
        steps=trainer.progress.step,
        anchors=trainer.progress.anchors,
        hours=trainer.progress.seconds / 3600,
        machine=machine_line(),
        initial_model=config.training.initial_model.name if config.training.initial_model else None,
        evaluations=read_curve(config.run),
        max_tokens=config.data.held_out_tokens,
    )
    (config.output / "README.md").write_text(render(config.output.name, record, measured))


def data_minutes(config: TrainConfig, minutes: float | None) -> float | None:
    """How long data may be written in a run of `minutes`."""
    return None if minutes is None else _DATA_SHARE * minutes


def _record(config: TrainConfig, conversations_file: Path, taps_file: Path, device: torch.device) -> None:
    model = load_target(config, device)
    prompts = list(read_prompts(config.data.held_out_prompts, TargetTokenizer.load(config.target)))
    answers = record_answers(
        model,
        prompts,
        config.draft.target_layer_ids,
        frozenset(eos_token_ids(config.target)),
        config.data.held_out_tokens,
        SamplingParams(temperature=0.0),
        device,
    )
    kept = [a for a in answers if len(a.ids) - a.answer_start > 1]
    if not kept:
        raise StartupError(f"{config.data.held_out_prompts}: the target answers none of its prompts")
    writer = TapWriter(taps_file)
    for answer in kept:
        writer.append(answer.taps)
    writer.close()
    write_shard(conversations_file, [Conversation(a.ids, a.answer_start, True, a.group) for a in kept])


def _target_config(config: TrainConfig) -> TargetConfig:
    return read_config(CheckpointFolder(config.target))
