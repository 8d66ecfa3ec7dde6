"""Training runs: what a step does, that a run which is taken up is the run that was never stopped, what is exported."""

import copy
import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import draft_training.trainer as training_module
from draft_training.acceptance import Answer
from draft_training.checkpoint import read_checkpoint
from draft_training.config import TrainConfig
from draft_training.curve import Evaluation, read_curve
from draft_training.dataset import Item
from draft_training.loss import block_loss
from draft_training.trainer import Trainer
from tandem.errors import StartupError
from tests.unit.training.worlds import CPU, chatting_target, load_run, write_random_shard

DFLASH2 = {"conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4}
VARIANTS: dict[str, dict[str, Any]] = {
    "DFlash": {},
    "DFlash, Muon": {"training": {"optimizer": "muon"}},
    "DFlash2, reduced head, Muon": {
        "draft": {"dflash2": DFLASH2, "draft_vocab_size": 200},
        "training": {"optimizer": "muon", "blocks": [4, 2]},
    },
}


def prepare(folder: Path, **changes: Any) -> TrainConfig:
    """A run of 18 conversations in two shards: an epoch is 4 steps of 2 x 2, so that 12 steps cross borders."""
    folder.mkdir(exist_ok=True)
    chatting_target(folder / "target", num_hidden_layers=2)
    config = load_run(folder, **changes)
    write_random_shard(config.run / "data", "a", 12, seed=1)
    write_random_shard(config.run / "data", "b", 7, seed=2)
    return config


def held_out() -> list[Answer]:
    return [Answer(list(range(30, 42)), 4, "g", torch.randn(11, 3 * 128, generator=torch.Generator().manual_seed(1)))]


class Recorded(Trainer):
    """A trainer that keeps each step's loss and conversations."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config, held_out(), CPU)
        self.losses: list[float] = []
        self.trained: list[list[Item]] = []

    def step(self, batches: list[list[Item]]) -> float:
        self.trained += batches
        self.losses.append(super().step(batches))
        return self.losses[-1]


def stop_after(trainer: Recorded, steps: int) -> Callable[[], bool]:
    return lambda: len(trainer.losses) >= steps


def ignore(_: Evaluation) -> None:
    pass


def run_in_pieces(
    config: TrainConfig, pieces: list[int], between: Callable[[int], None]
) -> tuple[list[float], Recorded]:
    losses = []
    for number, steps in enumerate(pieces):
        trainer = Recorded(config)
        trainer.run(stop_after(trainer, steps), ignore)
        losses += trainer.losses
        between(number)
    return losses, trainer


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_taken_up_is_the_run_never_stopped(variant: str, tmp_path: Path) -> None:
    """Same losses and same weights, bit for bit, wherever it is stopped: within an epoch, at its last step, across the
    border; shards that are added meanwhile enter with the next epoch in both."""
    whole = prepare(tmp_path / "whole", **VARIANTS[variant])
    pieces = prepare(tmp_path / "pieces", **VARIANTS[variant])

    def add_data(config: TrainConfig) -> None:
        write_random_shard(config.run / "data", "c", 8, seed=3)

    trainer = Recorded(whole)

    def stop() -> bool:
        # In the middle of the first epoch, as with the other run.
        if len(trainer.losses) == 3 and not (whole.run / "data" / "c.taps").is_file():
            add_data(whole)
        return False

    trainer.run(stop, ignore)
    losses, last = run_in_pieces(pieces, [3, 1, 2, 99], lambda number: add_data(pieces) if number == 0 else None)
    assert len(trainer.losses) == 12
    assert len(set(trainer.losses)) == 12
    assert losses == trainer.losses
    for name, tensor in trainer.network.state_dict().items():
        assert torch.equal(tensor, last.network.state_dict()[name])
    assert last.progress.shards == ["a", "b", "c"]
    assert (last.progress.step, last.progress.anchors) == (trainer.progress.step, trainer.progress.anchors)
    for config in (whole, pieces):
        trainer.export(config.output) if config is whole else last.export(config.output)
    exported = [load_file(config.output / "model.safetensors") for config in (whole, pieces)]
    assert all(torch.equal(tensor, exported[1][name]) for name, tensor in exported[0].items())


def test_a_step_takes_the_next_batches(tmp_path: Path) -> None:
    """Steps go through the epochs' batches in order and leave none out, except at an epoch's end what is less than a
    step: here 9 batches of 19 conversations, 2 per step."""
    config = prepare(tmp_path)
    trainer = Recorded(config)
    trainer.run(stop_after(trainer, 7), ignore)
    # The dataset's own items, by what they hold: it is read anew for every epoch.
    epochs = [list(trainer._dataset.epoch(config.training.seed, n, 2)) for n in (0, 1)]
    assert [len(epoch) for epoch in epochs] == [9, 9]
    expected = epochs[0][:8] + epochs[1][:6]
    ids = [[[item.conversation.ids for item in batch] for batch in some] for some in (trainer.trained, expected)]
    assert ids[0] == ids[1]


def test_a_killed_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """Steps after the last checkpoint are done again, with the same losses."""
    config = prepare(tmp_path)
    trainer = Recorded(config)
    trainer.run(stop_after(trainer, 5), ignore)
    lost = Recorded(config)
    stop = stop_after(lost, 3)

    def die() -> bool:
        if stop():
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        lost.run(die, ignore)
    again = Recorded(config)
    assert again.progress.step == 5
    again.run(lambda: False, ignore)
    assert again.losses[:3] == lost.losses
    assert again.finished
    finished = Recorded(config)
    finished.run(lambda: False, ignore)
    assert finished.losses == []


def test_an_unfinished_checkpoint_is_no_checkpoint(tmp_path: Path) -> None:
    """The old one counts until the new one is complete."""
    config = prepare(tmp_path)
    trainer = Recorded(config)
    trainer.run(stop_after(trainer, 2), ignore)
    (config.run / "checkpoint.pt.part").write_bytes(b"half")
    assert Recorded(config).progress.step == 2


@pytest.mark.parametrize("clip", [0.05, 1e9])
def test_a_step_is_adamw_on_the_mean_loss(clip: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient is that of all valid slots' weighted mean over all forwards of a step, clipped; AdamW decays
    matrices only; the average follows the weights, the faster the younger the run."""
    settings = {"clip_norm": clip, "weight_decay": 0.3, "warmup_share": 0}
    trainer = Recorded(prepare(tmp_path, training=settings))
    reference = copy.deepcopy(trainer.network)
    by_kind = [[p for p in reference.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False)]
    groups = [{"params": by_kind[0], "weight_decay": 0.3}, {"params": by_kind[1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=trainer.config.training.learning_rate, betas=(0.9, 0.95))
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []

    def spy(network: Any, hidden: Any, batch: Any, *rest: Any) -> Any:
        parts.append(block_loss(reference, reference(batch.anchors), batch, *rest))
        return block_loss(network, hidden, batch, *rest)

    monkeypatch.setattr(training_module, "block_loss", spy)
    before = {name: tensor.clone() for name, tensor in trainer._average.items()}
    loss = trainer.step(list(trainer._dataset.epoch(0, 0, 2))[:2])
    assert len(parts) == 2
    weight = torch.stack([w for _, w in parts]).sum()
    mean = torch.stack([s for s, _ in parts]).sum() / weight
    for parameter in reference.parameters():
        parameter.grad = parameter.grad / weight
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), clip)
    assert norm > 0.05, "clipping should matter"
    optimizer.step()
    assert loss == pytest.approx(float(mean), rel=1e-5)
    for (name, tensor), expected in zip(trainer.network.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(tensor.grad, expected.grad, rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(tensor, expected, rtol=1e-3, atol=2e-5)
        torch.testing.assert_close(trainer._average[name], torch.lerp(tensor.detach(), before[name], 2 / 11))


def test_a_steps_forwards_take_blocks_of_the_lengths_set_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Recorded(prepare(tmp_path, training={"accumulation": 4, "blocks": [4, 2, 3]}))
    lengths = []

    def spy(network: Any, hidden: torch.Tensor, batch: Any, *rest: Any) -> Any:
        lengths.append(batch.anchors.tokens.shape[2])
        assert hidden.shape[2] == batch.labels.shape[2] == lengths[-1] - 1
        return block_loss(network, hidden, batch, *rest)

    monkeypatch.setattr(training_module, "block_loss", spy)
    trainer.run(stop_after(trainer, 2), ignore)
    assert lengths == [4, 2, 3, 4] * 2


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_products_in_bfloat16_change_little(tmp_path: Path) -> None:
    """With `autocast` losses agree with fp32's to bfloat16's precision, and do differ."""
    losses = []
    for autocast in (False, True):
        trainer = Recorded(prepare(tmp_path / str(autocast), training={"autocast": autocast}))
        trainer.run(stop_after(trainer, 3), ignore)
        losses.append(trainer.losses)
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
    assert losses[1] != losses[0]


def test_the_learning_rate_rises_and_falls(tmp_path: Path) -> None:
    """Linear warm-up to the peak, then a cosine to nothing at the last step."""
    trainer = Recorded(prepare(tmp_path, training={"steps": 100, "warmup_share": 0.1, "learning_rate": 1.0}))
    rates = [trainer._learning_rate(step) for step in range(101)]
    assert rates[:10] == pytest.approx([(n + 1) / 10 for n in range(10)])
    assert rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5)
    assert rates[100] == pytest.approx(0.0)
    assert rates[32] == pytest.approx(0.5 * (1 + math.cos(math.pi * 22 / 90)))


def test_the_curve_is_kept(tmp_path: Path) -> None:
    """Each evaluation is reported, and can be read back in order, across stops."""
    config = prepare(tmp_path, training={"evaluate_minutes": 1e-9})
    told: list[Evaluation] = []
    trainer = Recorded(config)
    trainer.run(stop_after(trainer, 2), told.append)
    trainer = Recorded(config)
    trainer.run(stop_after(trainer, 1), told.append)
    assert [e.step for e in told] == [0, 1, 2, 2, 3, 3]
    assert read_curve(config.run) == told
    assert told[0].loss == 0
    assert told[1].loss > 0
    assert all(1 <= e.block <= 4 and e.tree >= 1 for e in told)
    assert all(a.seconds <= b.seconds for a, b in pairwise(told))


def test_the_last_layers_are_the_start(tmp_path: Path) -> None:
    """Without an initial model, draft layers begin as the target's last ones where names and shapes agree."""
    config = prepare(tmp_path, draft={"num_hidden_layers": 1, "intermediate_size": None})
    target = load_file(config.target / "model.safetensors")
    network = Trainer(config, held_out(), CPU).network.state_dict()
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "input_layernorm"):
        assert torch.equal(network[f"layers.0.{name}.weight"], target[f"model.layers.1.{name}.weight"])
    narrow = prepare(tmp_path / "narrow", draft={"num_hidden_layers": 1})
    network = Trainer(narrow, held_out(), CPU).network.state_dict()
    assert torch.equal(network["layers.0.self_attn.q_proj.weight"], target["model.layers.1.self_attn.q_proj.weight"])
    assert network["layers.0.mlp.gate_proj.weight"].shape[0] == 32


def test_an_initial_model_is_the_start(tmp_path: Path) -> None:
    """The evaluation before the first step is that of the initial model: its exported weights are the same."""
    config = prepare(tmp_path)
    first = Recorded(config)
    first.run(stop_after(first, 4), ignore)
    first.export(config.output)
    follower = load_run(tmp_path, run="next", training={"initial_model": "trained/draft"})
    write_random_shard(follower.run / "data", "a", 12, seed=9)
    trainer = Recorded(follower)
    trainer.export(tmp_path / "begun")
    begun, initial = (load_file(f / "model.safetensors") for f in (tmp_path / "begun", config.output))
    for name, tensor in initial.items():
        torch.testing.assert_close(begun[name].float(), tensor.float(), rtol=2**-7, atol=0)


def test_what_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    """Another draft section than the checkpoint's, and too little data, name the key."""
    config = prepare(tmp_path)
    trainer = Recorded(config)
    trainer.run(stop_after(trainer, 1), ignore)
    with pytest.raises(StartupError, match=r"draft: .*checkpoint.pt was trained with another block_size; remove it"):
        Recorded(load_run(tmp_path, draft={"block_size": 6}))
    with pytest.raises(StartupError, match=r"another architectures, dflash_config, is_causal"):
        Recorded(load_run(tmp_path, draft={"dflash2": DFLASH2}))
    with pytest.raises(StartupError, match=r"training.optimizer: .* was trained with another; remove it"):
        Recorded(load_run(tmp_path, training={"optimizer": "muon"}))
    torch.save({**torch.load(config.run / "checkpoint.pt"), "older": 1}, config.run / "checkpoint.pt")
    with pytest.raises(StartupError, match=r"checkpoint.pt is of another version's form; remove it"):
        Recorded(config)
    (config.run / "checkpoint.pt").unlink()
    with pytest.raises(StartupError, match=r"19 conversations, a step takes 20 \(training.batch_conversations"):
        Recorded(load_run(tmp_path, training={"batch_conversations": 5, "accumulation": 4}))


def test_checkpoints_hold_what_they_say(tmp_path: Path) -> None:
    """The format that runs on disk have: plain containers and tensors, readable without running code."""
    config = prepare(tmp_path, draft={"draft_vocab_size": 100})
    trainer = Recorded(config)
    trainer.run(stop_after(trainer, 1), ignore)
    raw = torch.load(config.run / "checkpoint.pt", weights_only=True)
    assert set(raw) == {"progress", "network", "average", "optimizers", "tokens", "tap_scale", "draft"}
    assert raw["progress"]["step"] == 1
    assert len(raw["tokens"]) == 100
    config_json = json.loads((config.run / "evaluated" / "config.json").read_text())
    assert raw["draft"] == config_json
    read = read_checkpoint(config.run, config_json)
    assert read is not None
    assert read.progress == trainer.progress
