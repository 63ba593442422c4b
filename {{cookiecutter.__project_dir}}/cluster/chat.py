"""Talks to the served model from a terminal: what `inv chat` runs."""

import contextlib
import json
import os
import readline  # noqa: F401  gives input() line editing and a history
from collections.abc import Iterator, Mapping

import httpx2
import openai
from openai.types.chat import ChatCompletionMessageParam

import settings
from pipeline.ray_support import job_secrets

HELP = "/system TEXT: who the model shall be   /model NAME: ask another   /clear: forget what was said   /quit"

TIMEOUTS = openai.Timeout(300, connect=5)  # seconds: 5 to connect, 300 between two chunks of an answer


class Conversation:
    """What was said so far, and who is asked next."""

    def __init__(self, client: openai.OpenAI, model: str) -> None:
        self.client = client
        self.model = model
        self.messages: list[ChatCompletionMessageParam] = []

    def answer(self, question: str) -> Iterator[str]:
        """The model's answer, piece by piece. What was said is remembered, also when the reader stops half-way."""
        self.messages.append({"role": "user", "content": question})
        said: list[str] = []
        try:
            for chunk in self.client.chat.completions.create(model=self.model, messages=self.messages, stream=True):
                if chunk.choices and (piece := chunk.choices[0].delta.content):
                    said.append(piece)
                    yield piece
        finally:
            if said:
                self.messages.append({"role": "assistant", "content": "".join(said)})
            else:
                self.messages.pop()  # a question too long for the model, say, must not spoil the next

    def models(self) -> list[str]:
        """Names of all that are served there."""
        return [model.id for model in self.client.models.list()]

    def start_over(self, system: str | None = None) -> None:
        """Forget all but the system message; a text replaces that too."""
        if system is None:
            self.messages = [message for message in self.messages[:1] if message["role"] == "system"]
        else:
            self.messages = [{"role": "system", "content": system}]


def chat(url: str, secrets_at: Mapping[str, str], message: str = "") -> None:
    """Ask one question, or converse until /quit when there is none; `secrets_at` says where the server's key is.

    Raises:
        settings.UserError: there is no key, the server is away, or it refuses the key.
    """
    client = openai.OpenAI(base_url=url, api_key=key(secrets_at), max_retries=0, timeout=TIMEOUTS)
    with explained(url):
        conversation = Conversation(client, client.models.list().data[0].id)
        if message:
            _print_answer(conversation, message)
        else:
            _converse(conversation, url)


def key(secrets_at: Mapping[str, str]) -> str:
    """The server's key, from where `secrets_at` says.

    Raises:
        settings.UserError: there is none.
    """
    os.environ |= {name: value for name, value in secrets_at.items() if name.startswith(("SECRETS_", "AWS_"))}
    os.environ["SECRET_NAMES"] = "SERVE_API_KEY"
    job_secrets.load()
    if found := os.environ.get("SERVE_API_KEY"):
        return found
    raise settings.UserError("SERVE_API_KEY is not set: put the server's key into .env.")


@contextlib.contextmanager
def explained(url: str) -> Iterator[None]:
    """Turns what OpenAI's client raises into one sentence, a `settings.UserError`."""
    try:
        yield
    except (openai.APIConnectionError, httpx2.TransportError):
        raise settings.UserError(f"nothing answers at {url}: serve a model with inv submit serve_llm") from None
    except openai.AuthenticationError:
        raise settings.UserError(
            f"{url} refuses the SERVE_API_KEY of .env: it was started with another one; inv submit serve_llm again."
        ) from None
    except (json.JSONDecodeError, AttributeError, LookupError):  # OpenAI's client does not validate what it receives
        raise settings.UserError(f"{url} is not an OpenAI-compatible server. Check with: inv status") from None
    except openai.APIError as error:
        raise settings.UserError(f"{url} answers: {error.message}") from None


def _converse(conversation: Conversation, url: str) -> None:
    print(f"{conversation.model} at {url}   {HELP}")
    while True:
        try:
            line = input("\n> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if line == "/quit":
            return
        if line.startswith("/"):
            _obey(conversation, line)
        elif line:
            _print_answer_or_reason(conversation, line)


def _obey(conversation: Conversation, line: str) -> None:
    command, _, text = line.partition(" ")
    if command == "/clear":
        conversation.start_over()
    elif command == "/system" and text.strip():
        conversation.start_over(text.strip())
    elif command == "/model":
        _choose_model(conversation, text.strip())
    else:
        print(HELP)


def _choose_model(conversation: Conversation, name: str) -> None:
    """What was said stays: the next answer is the other model's."""
    names = conversation.models()
    if name in names:
        conversation.model = name
    elif name:
        print(f"no model {name} is served; there is: {', '.join(names)}")
        return
    print("\n".join(f"{'*' if name == conversation.model else ' '} {name}" for name in names))


def _print_answer(conversation: Conversation, question: str) -> None:
    for piece in conversation.answer(question):
        print(piece, end="", flush=True)
    print()


def _print_answer_or_reason(conversation: Conversation, question: str) -> None:
    """Ctrl-C ends the answer, not the conversation; so does a request that the server refuses."""
    try:
        _print_answer(conversation, question)
    except KeyboardInterrupt:
        print(" (stopped)")
    except (openai.BadRequestError, openai.NotFoundError) as error:  # the latter: adapters that have gone, say
        print(f"{error.message}\n{HELP}")
