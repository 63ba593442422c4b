"""Talk to the served model from a terminal. `inv chat` runs this."""

import contextlib
import json
import os
import readline  # noqa: F401  gives input() line editing and history
import sys
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import httpx2
import openai
from openai.types.chat import ChatCompletionMessageParam

from raymill import settings
from raymill.errors import UserError
from raymill.job_context import JobContext
from raymill.printable import printable
from raymill.ray_support import job_secrets

HELP = "/system TEXT: set the system message   /model NAME: switch models   /clear: start over   /quit"

DIM, PLAIN = "\033[2m", "\033[0m"

TIMEOUTS = openai.Timeout(300, connect=5)  # seconds: 5 to connect, 300 between two chunks of an answer


class Piece(NamedTuple):
    """A part of an answer, or of the reasoning before it."""

    text: str
    is_reasoning: bool = False


class ChatSession:
    """A conversation: the messages so far, and the model that answers next."""

    def __init__(self, client: openai.OpenAI, model: str) -> None:
        self.client = client
        self.model = model
        self.messages: list[ChatCompletionMessageParam] = []

    def answer(self, question: str) -> Iterator[Piece]:
        """Yield the model's answer piece by piece. Remember what was yielded, even if the caller stops early.

        Reasoning is not remembered, because chat templates drop it from earlier turns.
        """
        self.messages.append({"role": "user", "content": question})
        pieces: list[str] = []
        try:
            for chunk in self.client.chat.completions.create(model=self.model, messages=self.messages, stream=True):
                if not chunk.choices:
                    continue
                delta = chunk.choices[0].delta
                if reasoning := getattr(delta, "reasoning", None):  # a field of vLLM's
                    yield Piece(reasoning, is_reasoning=True)
                if delta.content:
                    pieces.append(delta.content)
                    yield Piece(delta.content)
        finally:
            if pieces:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self.messages.pop()  # forget a question without an answer; it may be too long for the model

    def models(self) -> list[str]:
        """Return the names of all served models."""
        return [model.id for model in self.client.models.list()]

    def start_over(self, system: str | None = None) -> None:
        """Forget all messages except the system message. If `system` is given, it replaces the system message."""
        if system is None:
            self.messages = [message for message in self.messages[:1] if message["role"] == "system"]
        else:
            self.messages = [{"role": "system", "content": system}]


def chat(url: str, variables: Mapping[str, str], message: str = "") -> None:
    """Ask `message`, or chat until /quit if it is empty. For `variables`, see `api_key`.

    Raises:
        UserError: there is no key, or the server does not answer, rejects the key or returns another error.
    """
    client = openai.OpenAI(base_url=url, api_key=api_key(variables), max_retries=0, timeout=TIMEOUTS)
    with readable_errors(url):
        session = ChatSession(client, client.models.list().data[0].id)
        if message:
            _print_answer(session, message)
        else:
            _loop(session, url)


def api_key(variables: Mapping[str, str]) -> str:
    """Return the server's key. Raises `UserError` if there is none.

    `variables` are the environment variables of submitted jobs, which say where to find the key.
    """
    os.environ |= {name: value for name, value in variables.items() if name.startswith(("SECRETS_", "AWS_"))}
    os.environ |= JobContext(secret_names="SERVE_API_KEY").variables()
    job_secrets.load()
    if found := os.environ.get("SERVE_API_KEY"):
        return found
    raise UserError("SERVE_API_KEY is not set. Put the server's key into .env")


@contextlib.contextmanager
def readable_errors(url: str) -> Iterator[None]:
    """Turn an error of the OpenAI client into a `UserError`."""
    try:
        yield
    except (openai.APIConnectionError, httpx2.TransportError):
        raise UserError(f"nothing answers at {url}. Run: {settings.inv('submit serve_llm')}") from None
    except openai.AuthenticationError:
        raise UserError(
            f"{url} rejects the SERVE_API_KEY. If you have just changed it in .env, try again in ten seconds. "
            "If your shell sets another value, run: unset SERVE_API_KEY"
        ) from None
    except (json.JSONDecodeError, AttributeError, LookupError):  # the OpenAI client does not validate responses
        raise UserError(f"{url} is not an OpenAI-compatible server. Run: {settings.inv('status')}") from None
    except openai.APIError as error:
        raise UserError(f"{url} returned an error: {error.message}") from None


def _loop(session: ChatSession, url: str) -> None:
    print(f"{printable(session.model)} at {url}   {HELP}")
    while True:
        try:
            line = input("\n> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if line == "/quit":
            return
        if line.startswith("/"):
            _run_command(session, line)
        elif line:
            _print_answer_or_error(session, line)


def _run_command(session: ChatSession, line: str) -> None:
    command, _, text = line.partition(" ")
    if command == "/clear":
        session.start_over()
    elif command == "/system" and text.strip():
        session.start_over(text.strip())
    elif command == "/model":
        _switch_model(session, text.strip())
    else:
        print(HELP)


def _switch_model(session: ChatSession, name: str) -> None:
    """Print the served models. If `name` is one of them, switch to it first. It then gets all earlier messages."""
    names = session.models()
    if name in names:
        session.model = name
    elif name:
        print(printable(f"no model is named {name}. Served models: {', '.join(names)}"))
        return
    print("\n".join(f"{'*' if name == session.model else ' '} {printable(name)}" for name in names))


def _print_answer(session: ChatSession, question: str) -> None:
    """Print an answer as it is generated. In a terminal, print its reasoning first, in a dim color."""
    reasoned = False
    for piece in session.answer(question):
        text = printable(piece.text, "\n\t")
        if piece.is_reasoning:
            if sys.stdout.isatty():
                print(f"{DIM}{text}{PLAIN}", end="", flush=True)
                reasoned = True
            continue
        print("\n" * reasoned + text, end="", flush=True)
        reasoned = False
    print()


def _print_answer_or_error(session: ChatSession, question: str) -> None:
    """Print an answer. Ctrl-C and the errors 400 and 404 end the answer, but not the chat."""
    try:
        _print_answer(session, question)
    except KeyboardInterrupt:
        print(" (stopped)")
    except (openai.BadRequestError, openai.NotFoundError) as error:  # 404: for example, an adapter was deleted
        print(f"{printable(error.message)}\n{HELP}")
