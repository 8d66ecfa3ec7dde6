"""`tandem bench --against`: Tandem beside other engines, with the same weights and prompts, in one run."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.cli.console import console, errors

if TYPE_CHECKING:
    from tandem.bench.load import Plan
    from tandem.config import StackConfig

PEERS = ("transformers", "dflash", "llama.cpp")
LABELS = {"dflash": "dflash package"}
"""Names among the contenders, where they differ."""
INSTALL = "install tandem[peers]"


async def measure_peers(
    plan: Plan, config_path: Path, peers: tuple[str, ...], llama_python: Path | None, gguf: Path | None
) -> dict[str, Any]:
    """Starts the stack and the peers, lets them take turns, prints the tables; gives everything for JSON. One request
    at a time, greedy. StartupError if something cannot be started."""
    import yaml
    from rich.status import Status

    from tandem.bench.machine import machine, machine_line, versions
    from tandem.bench.peers.child import SCRIPTS, child
    from tandem.bench.peers.comparison import as_json, tables
    from tandem.bench.peers.measure import measure, ours
    from tandem.cli.demo_model import demo_source
    from tandem.cli.local_stack import local_stack
    from tandem.client import AsyncClient, Message
    from tandem.config import load_config
    from tandem.errors import StartupError
    from tandem.prompts import mixed_prompts

    config = load_config(config_path)
    if "dflash" in peers and config.draft_model is None:
        raise StartupError(f"--against dflash: {config_path} names no draft_model")
    async with contextlib.AsyncExitStack() as entered:
        if "llama.cpp" in peers and gguf is None:
            gguf = entered.enter_context(demo_source()).gguf
        address = await entered.enter_async_context(local_stack(config_path))
        client = await entered.enter_async_context(AsyncClient(address))
        model = await client.model()
        modes = plan.modes or tuple(mode for mode in ("off", "auto") if mode in model.speculation_modes)
        chats = [[Message(t.role, t.content) for t in p.messages] for p in mixed_prompts(plan.prompts, plan.kinds)]
        prompts = [await client.tokenize(chat) for chat in chats]
        known = {"eos": list(model.eos_token_ids), "context": max(map(len, prompts)) + plan.max_tokens + 1}
        running = []
        for name in peers:
            python, script, its = _command(name, config, llama_python, gguf)
            advice = f"{INSTALL}{', or give --llama-python another interpreter' if name == 'llama.cpp' else ''}"
            started = child(LABELS.get(name, name), python, SCRIPTS / script, known | its, advice)
            running.append(await entered.enter_async_context(started))
        status = entered.enter_context(Status("loading the peers", console=errors))
        for peer in running:
            await peer.start()

        def show(now: str) -> None:
            status.update(now)
            if not errors.is_terminal:
                errors.print(now)

        turns, cached = await measure(client, modes, running, prompts, plan.max_tokens, plan.runs, show)
    names = [ours(mode) for mode in modes]
    for table in tables(turns, names):
        console.print(table)
    tokens = sum(map(len, prompts))
    share = cached / (tokens * plan.runs * len(modes))
    told = f"Tandem had {share:.0%} of the prompts' tokens in its prefix cache"
    console.print(f"{told}, llama.cpp what a prompt shares with the one before, the others nothing", soft_wrap=True)
    for peer in running:
        console.print(f"{peer.name}: {peer.about}", soft_wrap=True)
    return as_json(turns, names) | {
        "peers": {peer.name: peer.about for peer in running},
        "gguf": gguf.name if gguf else None,
        "prompt_tokens": tokens,
        "prompt_tokens_cached_share": share,
        "prompts": plan.prompts,
        "max_tokens": plan.max_tokens,
        "runs": plan.runs,
        "target": config.target.name,
        "machine": machine(),
        "machine_line": machine_line(),
        "versions": versions(),
        "config": yaml.safe_load(config_path.read_text()),
    }


def _command(
    name: str, config: StackConfig, llama_python: Path | None, gguf: Path | None
) -> tuple[str, str, dict[str, str]]:
    """Interpreter, script and settings of a peer."""
    if name == "llama.cpp":
        return str(llama_python or sys.executable), "llama_child.py", {"model": str(gguf)}
    draft = {"draft": str(config.draft_model)} if name == "dflash" else {}
    return sys.executable, "transformers_child.py", {"model": str(config.target), **draft}
