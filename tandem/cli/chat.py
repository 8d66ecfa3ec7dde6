"""`tandem chat`: a conversation in a gateway session."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from tandem.cli.console import console, errors, fail
from tandem.cli.generate import describe, figures, stream
from tandem.cli.options import (
    DEFAULT_ADDRESS,
    AddressOption,
    MaxTokensOption,
    MinPOption,
    SeedOption,
    Speculation,
    SpeculationOption,
    SystemOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
)

if TYPE_CHECKING:
    from tandem.client import Client, Final

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
    speculation: SpeculationOption = Speculation.DEFAULT,
) -> None:
    """Talk with the model. The gateway keeps the conversation."""
    from tandem.client import Client, GenerationError

    sampling: dict[str, Any] = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
    }
    try:
        with Client(address) as client:
            model = client.model().model
            console.print(f"{model} at {address}. {HELP}.", soft_wrap=True, markup=False)
            conversation = Conversation(client, system, speculation, max_tokens, sampling)
            try:
                while conversation.turn():
                    pass
            finally:
                conversation.close()
    except GenerationError as error:
        fail(describe(error))


class Conversation:
    """One session after another with the same settings."""

    def __init__(
        self,
        client: Client,
        system: str | None,
        speculation: Speculation,
        max_tokens: int | None,
        sampling: dict[str, Any],
    ) -> None:
        self._client = client
        self._system = system
        self._speculation = speculation
        self._max_tokens = max_tokens
        self._sampling = sampling
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
            final = stream(
                self._client.generate(
                    [Message("user", text)],
                    session_id=self._session,
                    max_tokens=self._max_tokens,
                    speculation=self._speculation.value,
                    **self._sampling,
                )
            )
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
