"""The shipped prompt set."""

from collections import Counter

from tandem.prompts import load_prompts, mixed_prompts


def test_sixteen_prompts_of_each_kind_with_distinct_ids_and_texts() -> None:
    prompts = load_prompts()
    assert Counter(prompt.kind for prompt in prompts) == {"chat": 16, "code": 16, "maths": 16}
    assert len({prompt.id for prompt in prompts}) == len({prompt.messages for prompt in prompts}) == 48
    assert all(prompt.id.startswith(prompt.kind) for prompt in prompts)


def test_every_prompt_is_a_conversation_that_a_chat_template_accepts() -> None:
    """An optional system turn, then user and assistant in turns, the user last; short enough for a small context."""
    for prompt in load_prompts():
        roles = [turn.role for turn in prompt.messages]
        dialogue = roles[1:] if roles[0] == "system" else roles
        assert len(dialogue) % 2 == 1
        assert dialogue == ["user", "assistant"] * (len(dialogue) // 2) + ["user"]
        assert all(turn.content == turn.content.strip() != "" for turn in prompt.messages)
        assert sum(len(turn.content) for turn in prompt.messages) < 1000


def test_the_set_holds_multi_turn_and_system_prompts_of_each_kind() -> None:
    for kind in ("chat", "code", "maths"):
        prompts = [prompt for prompt in load_prompts() if prompt.kind == kind]
        assert any("assistant" in {turn.role for turn in prompt.messages} for prompt in prompts)
        assert any(prompt.messages[0].role == "system" for prompt in prompts)


def test_a_mix_may_be_of_some_kinds_only() -> None:
    """What a filter leaves out must not come back when the prompts start over."""
    assert [prompt.id for prompt in mixed_prompts(3, ["maths", "chat"])] == ["maths-01", "chat-01", "maths-02"]
    assert {prompt.kind for prompt in mixed_prompts(40, ["code"])} == {"code"}


def test_a_mix_takes_kinds_in_turn_and_starts_over_when_all_are_used() -> None:
    assert [prompt.id for prompt in mixed_prompts(4)] == ["chat-01", "code-01", "maths-01", "chat-02"]
    many = mixed_prompts(50)
    assert Counter(prompt.id for prompt in many[:48]) == Counter(prompt.id for prompt in load_prompts())
    assert many[48:] == many[:2]
