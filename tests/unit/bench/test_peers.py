"""`tandem bench --against`: contenders beside each other."""

import sys
from pathlib import Path

import pytest

from tandem.bench.peers.child import child
from tandem.bench.peers.comparison import Answer, Turn, order, ratios, standings
from tandem.errors import StartupError


def turn(contender: str, run: int, seconds: float, token_ids: tuple[int, ...] = (1, 2, 3, 4)) -> Turn:
    """One answer, of which half a second is the prompt's."""
    return Turn(contender, run, (Answer(token_ids, 0.5 + seconds, 0.5, 1),))


def test_decode_speed_leaves_the_prompt_and_the_first_message_out() -> None:
    blocks = Turn("tandem block", 1, (Answer((1, 2, 3, 4, 5, 6), 3.0, 1.0, 2), Answer((1,), 1.0, 1.0, 1)))
    assert blocks.whole == pytest.approx(7 / 4.0)
    assert blocks.decode == pytest.approx(4 / 2.0)
    assert Turn("tandem off", 1, (Answer((1,), 1.0, 1.0, 1),)).decode is None


def test_ratios_are_taken_within_runs_so_that_a_machine_that_slows_down_does_not_move_them() -> None:
    turns = [turn("tandem off", run, s) for run, s in ((1, 1.0), (2, 1.0), (3, 8.0))]
    turns += [turn("llama.cpp", run, s) for run, s in ((1, 2.0), (2, 2.0), (3, 16.0))]
    (ratio,) = ratios(turns, ["tandem off"])
    assert (ratio.ours, ratio.peer) == ("tandem off", "llama.cpp")
    assert ratio.decode_of_runs == pytest.approx([2.0, 2.0, 2.0])
    assert ratio.decode == pytest.approx(2.0)
    assert ratio.whole == pytest.approx(2.5 / 1.5)


def test_each_of_ours_is_compared_with_each_peer() -> None:
    names = ["tandem off", "tandem auto", "transformers", "llama.cpp"]
    turns = [turn(name, 1, 1.0) for name in names]
    found = [(r.ours, r.peer) for r in ratios(turns, names[:2])]
    assert found == [(a, b) for a in names[:2] for b in names[2:]]


def test_answers_are_compared_with_the_first_contenders_token_by_token() -> None:
    turns = [turn("tandem off", 1, 1.0), turn("llama.cpp", 1, 1.0, (1, 2, 9, 4)), turn("dflash", 1, 1.0)]
    ours, llama, dflash = standings(turns)
    assert (ours.equal_answers, llama.equal_answers, dflash.equal_answers) == (1, 0, 1)
    assert llama.prefix_agreement == pytest.approx(0.5)


def test_every_run_begins_with_another_contender() -> None:
    assert [order(["a", "b", "c"], run)[0] for run in range(4)] == ["a", "b", "c", "a"]
    assert sorted(order(["a", "b", "c"], 2)) == ["a", "b", "c"]


ECHO = """
import json, os, sys
print(json.dumps({"about": "echo " + os.environ.get("OMP_NUM_THREADS", "unset")}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    reply = {"token_ids": request["prompt"][: request["max_tokens"]], "seconds": 2.0, "first_seconds": 0.5}
    print(json.dumps(reply), flush=True)
"""


async def test_a_peer_answers_and_runs_without_this_process_thread_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a peer would be slowed down by settings that are good for Tandem."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    script = tmp_path / "echo.py"
    script.write_text(ECHO)
    async with child("echo", sys.executable, script, {}, "") as peer:
        await peer.start()
        assert peer.about == "echo unset"
        assert await peer.answer([5, 6, 7], 2) == Answer((5, 6), 2.0, 0.5, 1)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import no_such_engine", "No module named 'no_such_engine'; install it"),
        ("import sys; sys.exit('model.gguf: not found')", "model.gguf: not found"),
    ],
)
async def test_a_peer_that_cannot_start_says_why(tmp_path: Path, text: str, told: str) -> None:
    script = tmp_path / "broken.py"
    script.write_text(text)
    async with child("broken", sys.executable, script, {}, "install it") as peer:
        with pytest.raises(StartupError, match=rf"--against: broken: its process ended: .*{told}$"):
            await peer.start()


async def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"--against: llama.cpp: .*python: No such file"):
        async with child("llama.cpp", str(tmp_path / "python"), tmp_path, {}, ""):
            pass
