"""`tandem generate`: one question, one streamed answer."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.console import errors, fail
from tandem.cli.options import (
    DEFAULT_ADDRESS,
    AddressOption,
    MaxDraftNodesOption,
    MaxTokensOption,
    MinPOption,
    SeedOption,
    SpeculationMode,
    SpeculationModeOption,
    SystemOption,
    TemperatureOption,
    TlsCaOption,
    TlsCertOption,
    TlsKeyOption,
    TopKOption,
    TopPOption,
    tls_files,
)

if TYPE_CHECKING:
    from tandem.client import Final, Generation, GenerationError


def generate(
    question: Annotated[str, typer.Argument(help='The question; "-" reads it from standard input.')],
    address: AddressOption = DEFAULT_ADDRESS,
    system: SystemOption = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    min_p: MinPOption = None,
    seed: SeedOption = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end token.")] = False,
    speculation_mode: SpeculationModeOption = SpeculationMode.DEFAULT,
    max_draft_nodes: MaxDraftNodesOption = None,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print token, time and acceptance figures after it.")] = False,
) -> None:
    """Ask a question and stream the answer. Ctrl-C stops it."""
    from tandem.client import Client, GenerationError, Message
    from tandem.errors import StartupError

    if raw and system is not None:
        fail("--system needs the chat template, which --raw leaves out", code=2)
    text = sys.stdin.read() if question == "-" else question
    messages = [Message("system", system)] if system is not None else []
    prompt = text if raw else [*messages, Message("user", text)]
    try:
        with Client(address, tls_files(tls_ca, tls_cert, tls_key)) as client:
            generation = client.generate(
                prompt,
                max_tokens=max_tokens,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                min_p=min_p,
                seed=seed,
                stop=stop or (),
                ignore_eos=ignore_eos or None,
                speculation_mode=speculation_mode.value,
                max_draft_nodes=max_draft_nodes,
            )
            final = stream(generation)
    except StartupError as error:
        fail(str(error), code=2)
    except GenerationError as error:
        fail(describe(error))
    if final is None:
        raise typer.Exit(130)
    if stats:
        errors.print(figures(final))


def stream(generation: Generation) -> Final | None:
    """Write the text as it comes to standard output; None if Ctrl-C cancelled it."""
    out = sys.stdout
    reconfigure = getattr(out, "reconfigure", None)  # a terminal that is not UTF-8 shows what it can
    if reconfigure is not None:
        reconfigure(errors="replace")
    try:
        for chunk in generation:
            out.write(chunk.text)
            out.flush()
        return generation.final
    except KeyboardInterrupt:
        generation.cancel()
        return None
    finally:
        out.write("\n")
        out.flush()


def figures(final: Final) -> str:
    """One line: tokens, times, acceptance."""
    seconds = final.total_seconds - final.time_to_first_token_seconds
    parts = [
        f"{final.completion_tokens} tokens in {final.total_seconds:.2f} s",
        f"first after {final.time_to_first_token_seconds * 1e3:.0f} ms",
    ]
    if final.completion_tokens > 1 and seconds > 0:
        parts.append(f"then {(final.completion_tokens - 1) / seconds:.1f} tokens/s")
    parts.append(f"prompt {final.prompt_tokens} tokens ({final.cached_prompt_tokens} cached)")
    if final.acceptance_length is None:
        parts.append(f"{final.steps} steps, none drafted")
    else:
        parts.append(f"{final.steps} steps, {final.drafts} drafted")
        parts.append(f"acceptance length {final.acceptance_length:.2f}")
        parts.append(
            f"accepted {final.accepted_tokens} of {final.drafted_tokens}"
            + (f" ({final.acceptance_rate:.0%})" if final.acceptance_rate is not None else "")
        )
    return ", ".join([*parts, f"ended by {final.finish_reason}, seed {final.seed}"])


def describe(error: GenerationError) -> str:
    """The error in one line."""
    fields = "; ".join(f"{field}: {reason}" for field, reason in error.violations)
    retry = f" (try again in {error.retry_after_seconds:g} s)" if error.retry_after_seconds is not None else ""
    return " ".join(f"{error.code}: {fields or error.message}{retry}".split())
