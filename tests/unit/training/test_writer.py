"""Writing conversations: what the target answers, which are kept, and the hidden states beside them."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from draft_training.config import TrainConfig
from draft_training.conversations import (
    Duplicates,
    shard_files,
)
from draft_training.dataset import Dataset
from draft_training.prompts import Prompt, open_turn, prompts_from_files, written_prompts
from draft_training.slot_decoder import SlotDecoder
from draft_training.writer import ConversationWriter, ShardSink
from gateway.chat_template import Turn
from gateway.tokenizer import TargetTokenizer
from tests.fakes.tiny_models import HIDDEN
from tests.fakes.tokenizers import EOS
from tests.unit.training.worlds import (
    CPU,
    SHAPE,
    World,
    Written,
    cycling_target,
    load_run,
    load_run_beside,
    load_target,
    never,
    prompt_lines,
    read,
)


def write(
    folder: Path, target: Path, config: TrainConfig, prompts: Iterator[Prompt], stop: Callable[[], bool] = never
) -> Written:
    folder.mkdir(parents=True, exist_ok=True)
    data = config.data
    room = data.max_prompt_tokens + data.max_answer_tokens
    decoder = SlotDecoder(load_target(target), data.slots, room, config.draft.target_layer_ids, CPU)
    sink = ShardSink(folder, "w0", data.shard_conversations, Duplicates())
    ConversationWriter(data, decoder, prompts, frozenset({EOS}), sink, seed=1).run(stop)
    return read(folder)


def plain_answer(model: LlamaForCausalLM, prompt: list[int], most: int) -> list[int]:
    ids = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=most, do_sample=False
    )
    return ids[0, len(prompt) :].tolist()


@torch.inference_mode()
def test_answers_and_hidden_states_are_the_targets(world: World, tmp_path: Path) -> None:
    """At temperature 0 every answer is plain decoding's, whatever runs in the slots beside it; each row beside it is
    transformers' residual stream behind the tapped blocks, then the final one before the norm, in bf16."""
    target, model = world
    texts = [f"Question {i}: why is {'x' * i} " for i in range(24)]
    (tmp_path / "prompts.jsonl").write_text(prompt_lines(texts))
    data = {"prompts": ["prompts.jsonl"], "greedy_share": 1, "min_answer_tokens": 2}
    config = load_run_beside(target, tmp_path, data)
    tokenizer = TargetTokenizer.load(target)
    written = write(tmp_path / "data", target, config, prompts_from_files(config.data, tokenizer, 0))
    answers = {tuple(ids): plain_answer(model, ids, 24) for ids in (tokenizer.encode(text) for text in texts)}
    expected_answers = {ids: answer for ids, answer in answers.items() if len(answer) >= 2}
    assert {tuple(c.ids[: c.answer_start]): c.ids[c.answer_start :] for c, _ in written} == expected_answers
    assert len({len(answer) for answer in expected_answers.values()}) > 2, "some answers should end by themselves"
    last: list[torch.Tensor] = []
    hook = model.model.layers[-1].register_forward_hook(lambda _, __, output: last.append(output[0]))
    for conversation, rows in written:
        states = model(torch.tensor([conversation.ids[:-1]]), output_hidden_states=True).hidden_states
        final = last.pop().view(len(rows), HIDDEN)
        expected = torch.cat([states[1][0], states[2][0], final], dim=-1)
        assert rows.shape == expected.shape
        torch.testing.assert_close(rows.float(), expected, rtol=2**-7, atol=1e-4)
    hook.remove()


@torch.inference_mode()
def test_the_user_turn_is_continued_closed_and_answered(world: World, tmp_path: Path) -> None:
    """A conversation that the target writes whole begins with the template and an opening, goes on with likely tokens,
    and has the template's closing exactly once before an answer of the target's: greedy answers are plain decoding's,
    the others' tokens lie among its top_k. Too long turns are dropped."""
    target, model = world
    config = load_run_beside(
        target, tmp_path, {"greedy_share": 0.5, "top_k": 20, "system_prompts": ["Be brief."], "system_share": 0.5}
    )
    tokenizer = TargetTokenizer.load(target)
    prompts = written_prompts(config.data, tokenizer, random.Random(1))
    steps = iter(range(600))
    written = write(tmp_path / "data", target, config, prompts, lambda: next(steps, None) is None)
    turns = {system: open_turn(tokenizer, system) for system in (None, "Be brief.")}
    openings = [tokenizer.encode(o) for o in ("Explain", "Why is", "")]
    seen = {"system": 0, "greedy": 0, "code": 0, "ended": 0}
    assert len(written) > 20
    for conversation, _ in written:
        ids, start = conversation.ids, conversation.answer_start
        with_system = ids[: len(turns["Be brief."][0])] == turns["Be brief."][0]
        before, closing = turns["Be brief." if with_system else None]
        assert ids[: len(before)] == before
        assert ids[start - len(closing) : start] == closing
        turn = ids[len(before) : start - len(closing)]
        assert EOS not in turn
        assert any(turn[: len(o)] == o for o in (openings if conversation.kind == "chat" else [[]]))
        assert start <= config.data.max_prompt_tokens
        answer = ids[start:]
        assert 4 <= len(answer) <= 24
        assert EOS not in answer[:-1]
        assert answer[-1] == EOS or len(answer) == 24
        logits = model(torch.tensor([ids])).logits[0]
        if conversation.greedy:
            assert logits[start - 1 : -1].argmax(dim=-1).tolist() == answer
        best = logits[:-1].topk(20).indices
        opening = min(len(turn), max(len(o) for o in openings))
        for place in (*range(len(before) + opening, start - len(closing)), *range(start, len(ids))):
            assert ids[place] in best[place - 1]
        seen["system"] += with_system
        seen["greedy"] += conversation.greedy
        seen["code"] += conversation.kind == "code"
        seen["ended"] += answer[-1] == EOS
    assert all(0 < count < len(written) for count in seen.values()), seen


def test_shared_beginnings_change_nothing(world: World, tmp_path: Path) -> None:
    """A conversation whose beginning was computed once for all has the tokens and hidden states of one that was fed
    token by token."""
    target, _ = world
    config = load_run_beside(target, tmp_path, {"greedy_share": 1, "min_answer_tokens": 2, "slots": 3})
    ids = TargetTokenizer.load(target).encode_chat([Turn("user", "why is the fox quick?")])
    results = []
    for shared in (0, 5, len(ids) - 1):
        prompts = [Prompt("", [*ids, extra], None, True, shared) for extra in (50, 60, 70, 80)]
        results.append(write(tmp_path / f"shared{shared}", target, config, iter(prompts)))
    for other in results[1:]:
        assert [c for c, _ in other] == [c for c, _ in results[0]]
        for (_, rows), (_, plain) in zip(other, results[0], strict=True):
            torch.testing.assert_close(rows.float(), plain.float(), rtol=2**-7, atol=1e-4)


def test_loops_are_cut(tmp_path: Path) -> None:
    """An answer that repeats one short phrase ends once that is plain; what was written until then is kept."""
    target = cycling_target(tmp_path / "target")
    config = load_run(tmp_path, data={"max_answer_tokens": 200, "greedy_share": 1})
    prompt = Prompt("", [5, 6, 107], None, True)
    ((conversation, _),) = write(tmp_path / "data", target, config, iter([prompt]))
    assert 96 <= conversation.answer_tokens <= 112 < 200
    assert conversation.ids[-12:] == conversation.ids[-24:-12]


def test_a_long_period_is_no_loop(tmp_path: Path) -> None:
    """Guards the test above: the same answer with a period beyond a phrase's runs to its full length."""
    target = cycling_target(tmp_path / "target", cycle=40)
    config = load_run(tmp_path, data={"max_answer_tokens": 200, "greedy_share": 1})
    ((conversation, _),) = write(tmp_path / "data", target, config, iter([Prompt("", [5, 6, 107], None, True)]))
    assert conversation.answer_tokens == 200


def test_short_answers_are_dropped(world: World, tmp_path: Path) -> None:
    """An answer that ends before min_answer_tokens leaves nothing behind, and its slot goes on with the next prompt."""
    target, _ = world
    prompts = [Prompt("", [9, 30 + i, 60 + i], None, True) for i in range(40)]
    all_of_them = write(
        tmp_path / "all",
        target,
        load_run_beside(target, tmp_path, {"min_answer_tokens": 2, "slots": 4}),
        iter(prompts),
    )
    long_ones = write(
        tmp_path / "long",
        target,
        load_run_beside(target, tmp_path, {"min_answer_tokens": 20, "slots": 4}),
        iter(prompts),
    )
    expected = [c for c, _ in all_of_them if c.answer_tokens >= 20]
    assert 0 < len(expected) < len(all_of_them)
    assert sorted((c.ids for c, _ in long_ones)) == sorted(c.ids for c in expected)


def test_stopping_completes_the_shard_begun(world: World, tmp_path: Path) -> None:
    """stop() ends writing after a step, with what is finished in a shard that can be trained on."""
    target, _ = world
    config = load_run_beside(target, tmp_path, {"shard_conversations": 1000, "greedy_share": 1})
    prompts = (Prompt("", [9, 30 + i % 300, 60], None, True) for i in range(100000))
    steps = iter(range(60))
    written = write(tmp_path / "data", target, config, prompts, lambda: next(steps, None) is None)
    assert len(shard_files(tmp_path / "data")) == 1
    assert 0 < len(written) < 100
    assert Dataset(tmp_path / "data", Dataset.complete(tmp_path / "data"), SHAPE).items
    assert not list((tmp_path / "data").glob("*.part"))
