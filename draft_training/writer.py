"""Writes training data: the target answers prompts, many at once, and its hidden states are kept as they pass by."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from draft_training.config import DataConfig
from draft_training.conversations import SUFFIX, Conversation, Duplicates, write_shard
from draft_training.prompts import Prompt
from draft_training.slot_decoder import Prefix, SlotDecoder
from draft_training.taps import SUFFIX as TAPS_SUFFIX
from draft_training.taps import TapWriter
from tandem.layers.argmax import argmax_rows
from tandem.layers.top_k import top_k_rows

_LOOP_TOKENS = 96
_LOOP_CHECK = 16
_LONGEST_PERIOD = 32


@dataclass
class _Slot:
    """One conversation being written. tokens[:fed] went through the target."""

    prompt: Prompt
    tokens: list[int]
    answer_start: int | None
    """Set once the prompt is complete."""
    fed: int = 0

    @classmethod
    def begin(cls, prompt: Prompt) -> "_Slot":
        return cls(prompt, list(prompt.ids), len(prompt.ids) if prompt.closing is None else None)


class ShardSink:
    """Collects finished conversations into shards of a folder."""

    def __init__(self, folder: Path, name: str, shard_conversations: int, duplicates: Duplicates):
        self._folder = folder
        self._name = name
        self._size = shard_conversations
        self._duplicates = duplicates
        self._conversations: list[Conversation] = []
        self._taps: TapWriter | None = None
        self._number = len(list(folder.glob(f"{name}-*{SUFFIX}")))
        self.answer_tokens = 0
        """In shards written by this sink."""

    def add(self, conversation: Conversation, taps: torch.Tensor) -> None:
        """taps: [tokens - 1, width]. A prompt that was seen before is dropped."""
        if not self._duplicates.add(conversation):
            return
        if self._taps is None:
            self._taps = TapWriter(self._folder / f"{self._name}-{self._number:05d}{TAPS_SUFFIX}")
        self._taps.append(taps)
        self._conversations.append(conversation)
        if len(self._conversations) == self._size:
            self.flush()

    def flush(self) -> None:
        """Complete the shard begun, however small."""
        if self._taps is None:
            return
        self._taps.close()
        write_shard(self._folder / f"{self._name}-{self._number:05d}{SUFFIX}", self._conversations)
        self.answer_tokens += sum(c.answer_tokens for c in self._conversations)
        self._number += 1
        self._conversations, self._taps = [], None


class ConversationWriter:
    """Writes conversations in the decoder's slots."""

    def __init__(
        self,
        config: DataConfig,
        decoder: SlotDecoder,
        prompts: Iterator[Prompt],
        eos: frozenset[int],
        sink: ShardSink,
        seed: int,
    ):
        self._config = config
        self._decoder = decoder
        self._prompts = prompts
        self._eos = eos
        self._sink = sink
        self._taps = torch.empty(config.slots, decoder.max_tokens, decoder.width, dtype=torch.bfloat16)
        self._prefixes: dict[tuple[int, ...], Prefix] = {}
        self._generator = torch.Generator(decoder.device).manual_seed(seed)

    @torch.inference_mode()
    def run(self, stop: Callable[[], bool]) -> None:
        """Write until stop() or until prompts run out. Conversations that are under way when it stops are lost."""
        slots = [self._begin(index) for index in range(self._config.slots)]
        while any(slots) and not stop():
            tokens = [slot.tokens[slot.fed] if slot else 0 for slot in slots]
            positions = [slot.fed if slot else 0 for slot in slots]
            step = self._decoder.step(tokens, positions)
            self._taps[torch.arange(len(slots)), torch.tensor(positions)] = step.taps.to("cpu", torch.bfloat16)
            chosen = self._choose(step.logits, slots)
            for index, slot in enumerate(slots):
                if slot is None:
                    continue
                slot.fed += 1
                if slot.fed < len(slot.tokens):
                    continue
                done = self._take(slot, chosen[index])
                if done is not None:
                    if done:
                        self._keep(index, slot)
                    slots[index] = self._begin(index)
        self._sink.flush()

    def _begin(self, index: int) -> _Slot | None:
        prompt = next(self._prompts, None)
        if prompt is None:
            return None
        slot = _Slot.begin(prompt)
        prefix = self._prefix(prompt)
        if prefix:
            self._decoder.begin_with(index, prefix)
            slot.fed = len(prefix.taps)
            self._taps[index, : slot.fed] = prefix.taps.to("cpu", torch.bfloat16)
        return slot

    def _prefix(self, prompt: Prompt) -> Prefix | None:
        """What the conversation begins with, computed in one go: a whole prompt but for its last token, or what prompts
        have in common, which is kept."""
        if prompt.closing is None:
            return self._decoder.prefix(prompt.ids[:-1]) if len(prompt.ids) > 1 else None
        shared = tuple(prompt.ids[: prompt.shared])
        if shared and shared not in self._prefixes:
            self._prefixes[shared] = self._decoder.prefix(list(shared))
        return self._prefixes.get(shared)

    def _choose(self, logits: torch.Tensor, slots: list[_Slot | None]) -> list[int]:
        """Greedy, or sampled from the top_k: answers at their temperature, user turns at 1."""
        greedy = argmax_rows(logits)
        sampled = [i for i, s in enumerate(slots) if s and not (s.prompt.greedy and s.answer_start is not None)]
        if sampled:
            rows = torch.tensor(sampled, device=logits.device)
            answering = torch.tensor([slots[i].answer_start is not None for i in sampled])  # type: ignore[union-attr]
            temperature = torch.where(answering, self._config.temperature, 1.0).to(logits.device)
            values, ids = top_k_rows(logits.index_select(0, rows).float(), min(self._config.top_k, logits.shape[-1]))
            picked = torch.multinomial((values / temperature[:, None]).softmax(-1), 1, generator=self._generator)
            greedy[rows] = ids.gather(1, picked)[:, 0]
        return greedy.tolist()

    def _take(self, slot: _Slot, token: int) -> bool | None:
        """Add a token. True: the conversation is complete; False: it is worth nothing; None: it goes on."""
        config, prompt = self._config, slot.prompt
        if slot.answer_start is None:
            assert prompt.closing
            if token == prompt.closing[0] or token in self._eos:
                written = len(slot.tokens) - len(prompt.ids)
                if written < 2:
                    return False
                slot.tokens += prompt.closing
                slot.answer_start = len(slot.tokens)
            else:
                slot.tokens.append(token)
                if len(slot.tokens) + len(prompt.closing) > config.max_prompt_tokens:
                    return False
            return None
        slot.tokens.append(token)
        answered = len(slot.tokens) - slot.answer_start
        if token in self._eos:
            return answered >= config.min_answer_tokens
        if answered >= config.max_answer_tokens or (answered % _LOOP_CHECK == 0 and _loops(slot.tokens, answered)):
            return True
        return None

    def _keep(self, index: int, slot: _Slot) -> None:
        assert slot.answer_start is not None
        conversation = Conversation(slot.tokens, slot.answer_start, slot.prompt.greedy, slot.prompt.kind)
        self._sink.add(conversation, self._taps[index, : len(slot.tokens) - 1])


def _loops(tokens: list[int], answered: int) -> bool:
    """Whether an answer's last tokens are one short phrase over and over: more of it teaches nothing."""
    if answered < _LOOP_TOKENS:
        return False
    end = tokens[-_LOOP_TOKENS:]
    return any(end[period:] == end[:-period] for period in range(1, _LONGEST_PERIOD + 1))
