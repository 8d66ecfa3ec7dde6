"""The training loop: steps, checkpoints that a run is taken up from exactly, held-out acceptance on the way."""

import json
import math
import random
import time
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path

import torch

from draft_training.acceptance import Acceptance, Answer, DflashSource, DraftBudget, measure
from draft_training.checkpoint import Checkpoint, Progress, read_checkpoint, write_checkpoint
from draft_training.config import TrainConfig
from draft_training.conversations import frequent_tokens
from draft_training.curve import Evaluation, add_to_curve
from draft_training.dataset import Dataset, Item, make_batch
from draft_training.export import draft_config_json, export
from draft_training.initial_weights import copy_last_layers, load_draft_model
from draft_training.loss import LossWeights, TargetHead, block_loss
from draft_training.network import DraftNetwork
from draft_training.optimizers import make_optimizers
from draft_training.taps import TapShape
from tandem.checkpoints.draft_config import DraftConfig
from tandem.checkpoints.folder import CheckpointFolder
from tandem.errors import StartupError
from tandem.speculation import DraftShape
from verifier_service.models.architectures import read_config

_SHORT_BLOCK, _MIDDLE_BLOCK = 8, 10


class Trainer:
    """One run in its folder."""

    def __init__(self, config: TrainConfig, held_out: Sequence[Answer], device: torch.device):
        """held_out: what acceptance is measured on. Takes up the folder's checkpoint if there is one. StartupError for
        what does not fit together."""
        self.config = config
        self._held_out = held_out
        self._device = device
        self._data = config.run / "data"
        target = CheckpointFolder(config.target)
        self._target_config = read_config(target)
        hidden, vocab = self._target_config.hidden_size, self._target_config.vocab_size
        self._shape = TapShape(len(config.draft.target_layer_ids), hidden)
        self._draft_json = draft_config_json(config.draft, target.text_config)

        checkpoint = read_checkpoint(config.run, self._draft_json)
        self.progress = checkpoint.progress if checkpoint else Progress()
        shards = self.progress.shards or Dataset.complete(self._data)
        self._dataset = Dataset(self._data, shards, self._shape)
        self.progress.shards = shards
        needed = config.training.batch_conversations * config.training.accumulation
        if len(self._dataset.items) < needed:
            raise StartupError(
                f"{self._data}: {len(self._dataset.items)} conversations, a step takes {needed} "
                "(training.batch_conversations x training.accumulation)"
            )

        prefix, tied = target.text_prefix, self._target_config.tied_head
        embedding = target.tensor(f"{prefix}model.embed_tokens.weight", (vocab, hidden), torch.float32)
        head = embedding if tied else target.tensor(f"{prefix}lm_head.weight", (vocab, hidden), torch.float32)
        norm = target.tensor(f"{prefix}model.norm.weight", (hidden,), torch.float32)
        count = config.draft.draft_vocab_size
        if checkpoint:
            self._tokens, tap_scale = checkpoint.tokens, checkpoint.tap_scale
        else:
            answers = (item.conversation for item in self._dataset.items)
            self._tokens = frequent_tokens(answers, count) if count else None
            tap_scale = self._dataset.tap_scale()
        rows = head if self._tokens is None else head[self._tokens]
        rows = rows.to(device)
        self._head = TargetHead(norm.to(device), self._target_config.eps, rows, self._tokens, vocab)

        torch.manual_seed(config.training.seed)
        self.network = DraftNetwork(self._parsed_config(), embedding.to(device), rows, tap_scale.to(device)).to(device)
        if not checkpoint and config.training.initial_model:
            load_draft_model(self.network, config.training.initial_model)
        elif not checkpoint:
            copy_last_layers(self.network, target, self._target_config.layers)
        self._tap_scale = tap_scale
        self._average = {name: tensor.clone() for name, tensor in self.network.state_dict().items()}
        self._optimizers = make_optimizers(self.network, config.training)
        if checkpoint:
            self.network.load_state_dict(checkpoint.network)
            self._average = {n: t.to(device) for n, t in checkpoint.average.items()}
            if checkpoint.optimizers.keys() != self._optimizers.keys():
                raise StartupError(
                    f"training.optimizer: {config.run} was trained with another; remove it to start over"
                )
            for name, optimizer in self._optimizers.items():
                decays = [group["weight_decay"] for group in optimizer.param_groups]
                optimizer.load_state_dict(checkpoint.optimizers[name])
                for group, decay in zip(optimizer.param_groups, decays, strict=True):
                    group["weight_decay"] = decay
        training = config.training
        decay = training.loss_decay or self._default_decay(config.draft.block_size)
        self._weights = LossWeights(decay, training.distribution_share, training.selector_weight)
        self._autocast = device.type == "cuda" if training.autocast is None else training.autocast
        self._losses: list[float] = []

    @property
    def finished(self) -> bool:
        return self.progress.step >= self.config.training.steps

    def run(self, stop: Callable[[], bool], report: Callable[[Evaluation], None]) -> None:
        """Train until all steps are done or stop(); checkpoints and evaluates on the way and at the end."""
        training, progress = self.config.training, self.progress
        started = checked = evaluated = time.monotonic()
        before = progress.seconds
        if progress.step == 0:
            report(self.evaluate())
        while not self.finished and not stop():
            pending: list[list[Item]] = []
            for number, items in enumerate(
                self._dataset.epoch(training.seed, progress.epoch, training.batch_conversations)
            ):
                if number < progress.batch:
                    continue
                pending.append(items)
                if len(pending) < training.accumulation:
                    continue
                self._losses.append(self.step(pending))
                progress.batch = number + 1
                pending = []
                now = time.monotonic()
                progress.seconds = before + now - started
                if now - checked >= 60 * training.checkpoint_minutes:
                    self.save()
                    checked = now
                if now - evaluated >= 60 * training.evaluate_minutes:
                    report(self.evaluate())
                    evaluated = time.monotonic()
                if self.finished or stop():
                    break
            else:
                self._next_epoch()
        progress.seconds = before + time.monotonic() - started
        self.save()
        report(self.evaluate())

    def step(self, batches: list[list[Item]]) -> float:
        """One optimizer step over some batches; returns its loss."""
        training, progress = self.config.training, self.progress
        chance = random.Random(f"{training.seed}/{progress.epoch}/{progress.step}")
        blocks = cycle(training.blocks or (self.config.draft.block_size,))
        made = [
            make_batch(items, self._shape, block, training.anchors, chance, self._device)
            for items, block in zip(batches, blocks, strict=False)
        ]
        self.network.train()
        self.network.zero_grad(set_to_none=True)
        sums = []
        for batch in made:
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast):
                hidden = self.network(batch.anchors)
            sums.append(block_loss(self.network, hidden, batch, self._head, self._weights))
            progress.anchors += int(batch.valid[:, :, 0].sum())
        total = sum(float(loss) for loss, _ in sums)
        weight = sum(float(weights) for _, weights in sums)
        for parameter in self.network.parameters():
            if parameter.grad is not None:
                parameter.grad /= weight
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), training.clip_norm)
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = self._learning_rate(progress.step)
            optimizer.step()
        progress.step += 1
        self._follow()
        return total / weight

    def evaluate(self) -> Evaluation:
        """Export, and measure what was exported as the services would run it."""
        folder = self.config.run / "evaluated"
        self.export(folder)
        source = DflashSource(folder, self.config.target, self._target_config, torch.float32, self._device)
        block, tree = Acceptance(), Acceptance()
        nodes = self.config.draft.block_size - 1
        for total, budget in ((block, DraftBudget(DraftShape.BLOCK, nodes)), (tree, DraftBudget(DraftShape.TREE, 32))):
            for part in measure(source, self._held_out, budget).values():
                total.add(part)
        losses, self._losses = self._losses, []
        evaluation = Evaluation(
            step=self.progress.step,
            seconds=round(self.progress.seconds, 1),
            loss=round(sum(losses) / len(losses), 4) if losses else 0.0,
            block=round(block.length, 4),
            tree=round(tree.length, 4),
            block_per_depth=[round(share, 4) for share in block.per_depth],
        )
        add_to_curve(self.config.run, evaluation)
        return evaluation

    def export(self, folder: Path) -> None:
        """The averaged weights as a DFlash folder."""
        export(folder, self._draft_json, self.network.export_state(self._average), self._tokens)

    def save(self) -> None:
        """Write the checkpoint."""
        write_checkpoint(
            self.config.run,
            Checkpoint(
                progress=self.progress,
                network=self.network.state_dict(),
                average=self._average,
                optimizers={name: optimizer.state_dict() for name, optimizer in self._optimizers.items()},
                tokens=self._tokens,
                tap_scale=self._tap_scale,
                draft=self._draft_json,
            ),
        )

    def _parsed_config(self) -> DraftConfig:
        folder = self.config.run / "evaluated"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self._draft_json))
        return DraftConfig.load(folder)

    def _learning_rate(self, step: int) -> float:
        training = self.config.training
        warmup = max(1, round(training.steps * training.warmup_share))
        if step < warmup:
            return training.learning_rate * (step + 1) / warmup
        done = (step - warmup) / max(1, training.steps - warmup)
        return training.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    @torch.no_grad()
    def _follow(self) -> None:
        # A young run averages over few steps, or the start would dominate.
        decay = min(self.config.training.average, (1 + self.progress.step) / (10 + self.progress.step))
        for name, tensor in self.network.state_dict().items():
            self._average[name].lerp_(tensor, 1 - decay)

    def _next_epoch(self) -> None:
        progress = self.progress
        progress.epoch += 1
        progress.batch = 0
        progress.shards = Dataset.complete(self._data)
        self._dataset = Dataset(self._data, progress.shards, self._shape)

    @staticmethod
    def _default_decay(block: int) -> float:
        return 4.0 if block <= _SHORT_BLOCK else 5.0 if block <= _MIDDLE_BLOCK else 7.0
