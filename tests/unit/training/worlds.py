"""Tiny targets, training runs and data that the tests of draft_training share."""

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import LlamaForCausalLM

from draft_training.config import TrainConfig
from draft_training.conversations import SUFFIX, Conversation, read_folder, write_shard
from draft_training.taps import SUFFIX as TAPS_SUFFIX
from draft_training.taps import TapFile, TapShape, TapWriter
from tandem.checkpoints.folder import CheckpointFolder
from tests.fakes.tiny_models import HIDDEN, VOCAB, map_target, random_target
from tests.fakes.tokenizers import CHATML, EOS, SPECIAL, byte_level
from verifier_service.models.decoder import DecoderModel
from verifier_service.models.loading import load_model

CPU = torch.device("cpu")
MASK = 511
"""A token that no text has: the tokenizer's ids end far below."""
SHAPE = TapShape(2, HIDDEN)
Settings = dict[str, Any]
World = tuple[Path, LlamaForCausalLM]
"""The folder of a chatting target, and transformers' model of it."""
Written = list[tuple[Conversation, torch.Tensor]]
"""Conversations with their rows of hidden states."""


def add_tokenizer(folder: Path) -> Path:
    byte_level().save(str(folder / "tokenizer.json"))
    settings = {"chat_template": CHATML, "eos_token": SPECIAL[EOS]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def chatting_target(folder: Path, **changes: Any) -> LlamaForCausalLM:
    """A random target with tokenizer and template that ends a turn about every twentieth token; returns transformers'
    model of it."""
    model = random_target(folder, **changes)
    with torch.no_grad():
        model.lm_head.weight[EOS] *= 2.5
    model.save_pretrained(folder)
    add_tokenizer(folder)
    return model


def cycling_target(folder: Path, cycle: int = 12) -> Path:
    """A target that counts in a circle of `cycle` tokens from any token on, forever: easily learned."""
    successor = [
        token + 1 if (token + 1) % cycle and token + 1 < VOCAB else token // cycle * cycle for token in range(VOCAB)
    ]
    return add_tokenizer(map_target(folder, successor))


def load_target(folder: Path) -> DecoderModel:
    return load_model(CheckpointFolder(folder), torch.float32, CPU)


def settings(**changes: Any) -> Settings:
    """A run's configuration; the target lies in `target`. Values of changes go into sections, None removes a key."""
    whole: Settings = {
        "target": "target",
        "run": "run",
        "output": "trained/draft",
        "device": "cpu",
        "threads": 1,
        "data": {
            "answer_tokens": 400,
            "held_out_prompts": "held_out.jsonl",
            "held_out_tokens": 12,
            "max_prompt_tokens": 48,
            "max_answer_tokens": 24,
            "min_answer_tokens": 4,
            "slots": 6,
            "shard_conversations": 8,
            "kinds": {"chat": {"share": 1, "openings": ["Explain", "Why is", ""]}, "code": {"share": 1}},
        },
        "draft": {
            "target_layer_ids": [0, 1],
            "block_size": 4,
            "num_hidden_layers": 1,
            "intermediate_size": 32,
            "mask_token_id": MASK,
        },
        "training": {"steps": 12, "batch_conversations": 2, "accumulation": 2, "anchors": 3},
    }
    for section, values in changes.items():
        if isinstance(values, dict):
            merged = {**whole.get(section, {}), **values}
            whole[section] = {key: value for key, value in merged.items() if value is not None}
        else:
            whole[section] = values
    return whole


def write_run(folder: Path, **changes: Any) -> Path:
    """The configuration file of a run in this folder, and its held-out prompts."""
    held_out = [{"kind": k, "messages": [{"role": "user", "content": c}]} for k, c in (("a", "hello"), ("b", "fox"))]
    (folder / "held_out.jsonl").write_text("".join(json.dumps(line) + "\n" for line in held_out))
    file = folder / "train.yaml"
    file.write_text(yaml.safe_dump(settings(**changes)))
    return file


def load_run(folder: Path, **changes: Any) -> TrainConfig:
    return TrainConfig.load(write_run(folder, **changes))


def random_conversations(count: int, seed: int, vocab: int = 400) -> list[Conversation]:
    """Of 3 to 8 prompt tokens and 2 to 16 answer tokens."""
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    made = []
    for _ in range(count):
        prompt, answer = number(3, 9), number(2, 17)
        ids = torch.randint(3, vocab, (prompt + answer,), generator=generator).tolist()
        made.append(Conversation(ids, prompt, number(0, 2) == 1, "chat"))
    return made


def write_random_shard(folder: Path, name: str, count: int, seed: int) -> list[Conversation]:
    """A shard of random conversations with random hidden states of SHAPE."""
    folder.mkdir(parents=True, exist_ok=True)
    conversations = random_conversations(count, seed)
    generator = torch.Generator().manual_seed(seed)
    writer = TapWriter(folder / f"{name}{TAPS_SUFFIX}")
    for conversation in conversations:
        writer.append(torch.randn(len(conversation.ids) - 1, SHAPE.width, generator=generator))
    writer.close()
    write_shard(folder / f"{name}{SUFFIX}", conversations)
    return conversations


def never() -> bool:
    return False


def prompt_lines(texts: list[str], **more: Any) -> str:
    return "".join(json.dumps({"prompt": text, **more}) + "\n" for text in texts)


def read(folder: Path, shape: TapShape = SHAPE) -> Written:
    """Everything written into a run's folder."""
    found: Written = []
    for path, conversations in read_folder(folder):
        taps = TapFile(path.with_name(path.name.removesuffix(SUFFIX) + TAPS_SUFFIX), conversations, shape)
        found += [(c, taps.rows(i)) for i, c in enumerate(conversations)]
    return found


def load_run_beside(target: Path, folder: Path, data: dict[str, Any], **sections: Any) -> TrainConfig:
    return load_run(folder, target=str(target), data=data, **sections)
