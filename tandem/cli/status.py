"""`tandem status`: what runs, and how it does."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import typer
from rich.markup import escape
from rich.table import Table

from tandem.cli.console import console, fail
from tandem.cli.options import DEFAULT_CONFIG, ConfigOption

if TYPE_CHECKING:
    from tandem.cli.parts import Part
    from tandem.tls import ClientFiles
    from tandem.v1.generation_pb2 import StepTiming
    from tandem.v1.verification_pb2 import GetInfoResponse, GetLoadResponse, SpeculationState

TIMEOUT_SECONDS = 3.0


def status(config: ConfigOption = DEFAULT_CONFIG) -> None:
    """Show the parts of a stack, their health and live figures. Exits 1 if a part is not serving."""
    from tandem.cli.parts import parts_of
    from tandem.config import load_config
    from tandem.errors import StartupError
    from tandem.tls import client_files

    try:
        stack = load_config(config)
        parts, tls = parts_of(stack, config), client_files(stack.gateway.verifier_tls, "gateway.verifier_tls")
        healths, verifier = asyncio.run(_ask(parts, tls))
    except StartupError as error:
        fail(str(error), code=2)
    table = Table("part", "address", "health")
    for part, health in zip(parts, healths, strict=True):
        table.add_row(part.name, part.address, f"[green]{health}[/]" if health == "SERVING" else f"[red]{health}[/]")
    console.print(table)
    if verifier is not None:
        console.print(_figures(*verifier))
        if verifier[1].graph_buckets:
            console.print(_buckets(verifier[1]))
    if any(health != "SERVING" for health in healths):
        raise typer.Exit(1)


async def _ask(
    parts: list[Part], tls: ClientFiles | None
) -> tuple[list[str], tuple[GetInfoResponse, GetLoadResponse] | None]:
    verifier = next(part for part in parts if part.name == "verifier")
    healths, figures = await asyncio.gather(
        asyncio.gather(*(_health(part) for part in parts)), _verifier_figures(verifier.address, tls)
    )
    return healths, figures


async def _health(part: Part) -> str:
    """SERVING if all its health services are, else the first other answer."""
    from tandem.rpc import check_health

    answers = await asyncio.gather(
        *(check_health(part.health_address, s, TIMEOUT_SECONDS) for s in part.health_services)
    )
    return next((answer for answer in answers if answer != "SERVING"), "SERVING")


async def _verifier_figures(address: str, tls: ClientFiles | None) -> tuple[GetInfoResponse, GetLoadResponse] | None:
    import grpc

    from tandem.rpc import channel_options
    from tandem.tls import open_channel
    from tandem.v1 import verification_pb2, verification_pb2_grpc

    async with open_channel(address, tls, channel_options()) as channel:
        stub = verification_pb2_grpc.VerifierServiceStub(channel)
        try:
            return await asyncio.gather(
                stub.GetInfo(verification_pb2.GetInfoRequest(), timeout=TIMEOUT_SECONDS),
                stub.GetLoad(verification_pb2.GetLoadRequest(), timeout=TIMEOUT_SECONDS),
            )
        except grpc.aio.AioRpcError:
            return None


def _figures(info: GetInfoResponse, load: GetLoadResponse) -> Table:
    table = Table(show_header=False, title=f"verifier: {info.model}, {info.dtype}", title_justify="left")
    free = load.kv_blocks_total - load.kv_blocks_used - load.kv_blocks_cached
    table.add_row("sequences", f"{load.running_sequences} running, {load.waiting_sequences} waiting")
    table.add_row("KV blocks", f"{load.kv_blocks_used} used, {load.kv_blocks_cached} cached, {free} free")
    table.add_row("drafters", str(load.drafters))
    table.add_row("emitted tokens", str(load.emitted_tokens))
    if load.drafts:
        length = (load.drafts + load.accepted_tokens) / load.drafts
        table.add_row("acceptance length", f"{length:.2f} over {load.drafts} drafted steps")
    if load.drafted_tokens:
        rate = load.accepted_tokens / load.drafted_tokens
        table.add_row("acceptance rate", f"{rate:.1%} ({load.accepted_tokens} of {load.drafted_tokens})")
    if load.HasField("speculation"):
        table.add_row("speculation, mode auto", _speculation(load.speculation))
    if load.HasField("median_drafted_step"):
        table.add_row("drafted step, median", _timing(load.median_drafted_step))
    if load.HasField("median_plain_step"):
        table.add_row("plain step, median", _timing(load.median_plain_step))
    return table


def _buckets(load: GetLoadResponse) -> Table:
    captured = sum(bucket.captured for bucket in load.graph_buckets)
    title = f"graphs: {captured} of {len(load.graph_buckets)} buckets captured"
    table = Table("rows", "sequences", "captured", "runs", "mean ms", title=title, title_justify="left")
    for bucket in load.graph_buckets:
        state = "[green]yes[/]" if bucket.captured else f"[yellow]no[/]: {escape(bucket.reason)}"
        mean = f"{bucket.mean_us / 1e3:.2f}" if bucket.runs else ""
        table.add_row(str(bucket.rows), str(bucket.sequences), state, str(bucket.runs), mean)
    return table


def _speculation(state: SpeculationState) -> str:
    from tandem.v1.generation_pb2 import SPECULATION_MODE_TREE

    chosen = f"{state.asked_nodes} nodes" if state.mode == SPECULATION_MODE_TREE else "off"
    if not state.gain:
        return f"{chosen}: {state.reason}"
    predicted = f"{state.expected_tokens:.2f} tokens in {state.draft_us / 1e3:.1f} + {state.step_us / 1e3:.1f} ms"
    return (
        f"{chosen}: {state.reason}; gain {state.gain:.2f} ({predicted}, plain 1 in {state.plain_step_us / 1e3:.1f} ms)"
    )


def _timing(step: StepTiming) -> str:
    parts = {"draft": step.draft_us, "transfer": step.transfer_us, "verify": step.verify_us, "host": step.host_us}
    spent = " + ".join(f"{name} {us / 1e3:.1f}" for name, us in parts.items() if us)
    return f"{sum(parts.values()) / 1e3:.1f} ms = {spent or 0}; {step.rows} rows"
