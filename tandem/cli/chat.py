"""`tandem chat`: a conversation in a gateway session."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from tandem.cli.console import console, errors, fail
from tandem.cli.generate import describe, figures, stream
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
    from tandem.client import Client, Final, GenerateOptions

HELP = "/reset forgets the conversation, /stats shows figures of the last answer, /exit leaves; Ctrl-C stops an answer"


def chat(
    address: AddressOption = DEFAULT_ADDRESS,
    system: SystemOption = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    min_p: MinPOption = None,
    seed: SeedOption = None,
    speculation_mode: SpeculationModeOption = SpeculationMode.DEFAULT,
    max_draft_nodes: MaxDraftNodesOption = None,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
) -> None:
    """Talk with the model. The gateway keeps the conversation."""
    from tandem.client import Client, GenerationError
    from tandem.errors import StartupError

    options: GenerateOptions = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
        "speculation_mode": speculation_mode.value,
        "max_draft_nodes": max_draft_nodes,
    }
    try:
        with Client(address, tls_files(tls_ca, tls_cert, tls_key)) as client:
            model = client.model().model
            console.print(f"{model} at {address}. {HELP}.", soft_wrap=True, markup=False)
            conversation = Conversation(client, system, options)
            try:
                while conversation.turn():
                    pass
            finally:
                conversation.close()
    except StartupError as error:
        fail(str(error), code=2)
    except GenerationError as error:
        fail(describe(error))


class Conversation:
    """One session after another with the same settings."""

    def __init__(self, client: Client, system: str | None, options: GenerateOptions) -> None:
        self._client = client
        self._system = system
        self._options = options
        self._last: Final | None = None
        self._session = self._open()

    def turn(self) -> bool:
        """Read one line and act on it; False when the user leaves."""
        try:
            line = input("> ").strip()
        except EOFError:
            console.print()
            return False
        except KeyboardInterrupt:
            console.print("\nCtrl-D or /exit leaves")
            return True
        match line:
            case "":
                pass
            case "/exit":
                return False
            case "/reset":
                self.close()
                self._session = self._open()
                console.print("a new conversation")
            case "/stats":
                console.print(figures(self._last) if self._last else "no answer yet", soft_wrap=True, markup=False)
            case _ if line.startswith("/"):
                console.print(HELP)
            case _:
                self._ask(line)
        return True

    def close(self) -> None:
        """Forget the session at the gateway, if it is still there to do so."""
        from tandem.client import GenerationError

        with contextlib.suppress(GenerationError):
            self._client.close_session(self._session)

    def _ask(self, text: str) -> None:
        from tandem.client import GenerationError, Message

        try:
            options: GenerateOptions = {**self._options, "session_id": self._session}
            final = stream(self._client.generate([Message("user", text)], **options))
        except GenerationError as error:
            errors.print(describe(error), markup=False)
            if error.code == "NOT_FOUND":
                self._session = self._open()
                errors.print("the session had expired; a new conversation begins")
            return
        if final is None:
            self._until_free()
        else:
            self._last = final

    def _open(self) -> str:
        from tandem.client import Message

        return self._client.open_session([Message("system", self._system)] if self._system is not None else [])

    def _until_free(self) -> None:
        """A cancelled generation holds the session until the gateway has seen the cancellation."""
        for _ in range(50):
            if not self._client.get_session(self._session).busy:
                return
            time.sleep(0.02)
