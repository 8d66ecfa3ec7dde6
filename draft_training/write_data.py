"""A process that writes data: `python -m draft_training.write_data --config FILE --writer I`.

First the hidden states that shards still lack, then new conversations, until there are as many answer tokens as asked.
SIGTERM ends it in good order.
"""

import argparse
import logging
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from draft_training.config import DataConfig, TrainConfig
from draft_training.conversations import SUFFIX, Conversation, Duplicates, read_folder, read_shard, write_shard
from draft_training.prefill import TapComputer
from draft_training.prompts import Prompt, prompts_from_files, read_prompts, written_prompts
from draft_training.slot_decoder import SlotDecoder
from draft_training.taps import SUFFIX as TAPS_SUFFIX
from draft_training.taps import TapWriter
from draft_training.target import load_target
from draft_training.writer import ConversationWriter, ShardSink
from gateway.tokenizer import TargetTokenizer
from tandem.checkpoints.model_json import eos_token_ids
from tandem.errors import StartupError
from tandem.logs import setup_logging
from tandem.torch_setup import leave_cores_to_native, pick_device
from verifier_service.models.native_decoder import NativeDecoder

logger = logging.getLogger("draft_training")

_REPORT_SECONDS = 60.0


class DataWriter:
    """One of a run's writers."""

    def __init__(self, config: TrainConfig, writer: int):
        """StartupError for what the configuration and the target do not allow."""
        self._config = config
        self._writer = writer
        self._folder = config.run / "data"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._device = pick_device(config.device, "device")
        self._model = load_target(config, self._device)
        if isinstance(self._model, NativeDecoder):
            leave_cores_to_native()
        self._tokenizer = TargetTokenizer.load(config.target)
        self._eos = frozenset(eos_token_ids(config.target))

    def complete_taps(self, stop: Callable[[], bool]) -> None:
        """Compute the hidden states that this writer's share of the shards lack."""
        computer = TapComputer(self._model, self._config.draft.target_layer_ids, self._device)
        for number, (path, conversations) in enumerate(read_folder(self._folder)):
            taps = path.with_name(path.name.removesuffix(SUFFIX) + TAPS_SUFFIX)
            if taps.is_file() or number % self._config.data.writers != self._writer:
                continue
            if stop():
                return
            writer = TapWriter(taps)
            for rows in computer.rows([c.ids[:-1] for c in conversations]):
                writer.append(rows)
            writer.close()

    def write(self, stop: Callable[[], bool]) -> None:
        """Write this writer's share of the answer tokens that are missing."""
        config = self._config.data
        if not config.prompts and not config.kinds:
            return
        there = [c for _, shard in read_folder(self._folder) for c in shard]
        missing = config.answer_tokens - sum(c.answer_tokens for c in there)
        if missing <= 0:
            return
        # What is there already is part of the seed: a run that is taken up goes on, it does not start over.
        chance = random.Random(f"{config.seed}/{self._writer}/{len(there)}")
        seen = Duplicates([*there, *held_out(config, self._tokenizer)])
        prompts: Iterator[Prompt]
        if config.prompts:
            from_files = prompts_from_files(config, self._tokenizer, self._writer)
            prompts = (prompt for prompt in from_files if not seen.has(prompt.ids))
        else:
            prompts = written_prompts(config, self._tokenizer, chance)
        sink = ShardSink(self._folder, f"w{self._writer}", config.shard_conversations, seen)
        decoder = self._decoder(config.slots, config.max_prompt_tokens + config.max_answer_tokens)
        writing = ConversationWriter(config, decoder, prompts, self._eos, sink, chance.getrandbits(62))
        quota = -(-missing // config.writers)
        started = reported = time.monotonic()

        def enough() -> bool:
            nonlocal reported
            now = time.monotonic()
            if now - reported > _REPORT_SECONDS:
                reported = now
                rate = sink.answer_tokens / (now - started)
                logger.info("%d of %d answer tokens in shards, %.0f per second", sink.answer_tokens, quota, rate)
            return stop() or sink.answer_tokens >= quota

        writing.run(enough)

    def _decoder(self, slots: int, max_tokens: int) -> SlotDecoder:
        return SlotDecoder(self._model, slots, max_tokens, self._config.draft.target_layer_ids, self._device)


def held_out(config: DataConfig, tokenizer: TargetTokenizer) -> list[Conversation]:
    """The prompts that must not be trained on, as conversations of which nobody reads the answer."""
    return [
        Conversation([*ids, 0], len(ids), True, kind) for kind, ids in read_prompts(config.held_out_prompts, tokenizer)
    ]


def import_seed_shards(config: TrainConfig) -> None:
    """Copy conversations that were written earlier into the run's folder, in shards of its size. What is too short,
    held out or there already is left out."""
    folder, data = config.run / "data", config.data
    folder.mkdir(parents=True, exist_ok=True)
    # A file's first shard is written last: where it is, the file was copied whole.
    missing = {i: p for i, p in enumerate(data.seed_shards) if not (folder / f"seed{i}-00000{SUFFIX}").is_file()}
    if not missing:
        return
    duplicates = Duplicates(held_out(data, TargetTokenizer.load(config.target)))
    for number, path in missing.items():
        kept = [c for c in read_shard(path) if c.answer_tokens >= data.min_answer_tokens and duplicates.add(c)]
        for part in reversed(range(-(-len(kept) // data.shard_conversations))):
            start = part * data.shard_conversations
            write_shard(folder / f"seed{number}-{part:05d}{SUFFIX}", kept[start : start + data.shard_conversations])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--writer", type=int, required=True)
    arguments = parser.parse_args()
    setup_logging("draft-data", "info")
    try:
        _run(arguments.config, arguments.writer)
    except StartupError as error:
        logger.critical("%s", error)
        sys.exit(2)


def _run(config_file: Path, number: int) -> None:
    config = TrainConfig.load(config_file)
    torch.set_num_threads(max(1, (config.threads or torch.get_num_threads()) // config.data.writers))
    stopping = False

    def stop_now(*_: object) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop_now)
    signal.signal(signal.SIGINT, stop_now)
    writer = DataWriter(config, number)
    writer.complete_taps(lambda: stopping)
    writer.write(lambda: stopping)


if __name__ == "__main__":
    main()
