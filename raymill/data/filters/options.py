"""Options of the filters: the [preprocess.filters] table of settings.toml, and the command line."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from raymill import settings

Scope = Literal["turns", "answers", "all"]
Rules = Literal["gopher", "gopher_repetition", "fineweb"]
PII = Literal["keep", "replace", "drop"]
LanguageCode = Annotated[str, Field(pattern=r"^[a-z]{2,3}$")]
PIIKind = Literal["email", "phone", "card", "iban", "ip"]


class FilterOptions(settings.Section):
    """The [preprocess.filters] table of settings.toml. Without it, nothing is filtered."""

    scope: Scope = "turns"
    """Text that filters see, except pii. turns: messages of users and assistants; answers: those of assistants;
    all: also system prompts and tools."""
    near_duplicates: float = Field(0, ge=0, le=1)
    """Use only one of several rows whose texts are at least this similar, from 0 to 1. 0: off."""
    near_duplicates_words: PositiveInt = 5
    """Texts are as similar as the share of runs of this many words that they have in common."""
    decontaminate: tuple[str, ...] = ()
    """Inputs with evaluation questions. Training rows that share a run of words with one are dropped."""
    decontaminate_held_out: bool = False
    """Also drop training rows that share a run of words with a row that is held out for evaluation."""
    decontaminate_words: PositiveInt = 13
    """Number of words in such a run."""
    languages: tuple[LanguageCode, ...] = ()
    """Languages to keep, as en or de. Texts too short to tell are kept."""
    language_score: float = Field(0.5, ge=0, le=1)
    """A row is dropped only if its language is recognized with at least this probability."""
    language_characters: PositiveInt = 40
    """Texts with fewer characters are too short to tell their language."""
    min_words: int = Field(0, ge=0)
    """Drop rows with fewer words."""
    max_words: PositiveInt | None = None
    """Drop rows with more words."""
    rules: tuple[Rules, ...] = ()
    """Published rules for texts of the web, which are strict on short answers and on code: gopher, gopher_repetition,
    fineweb."""
    pii: PII = "keep"
    """What to do with mail addresses and the like: keep them, replace them, for example by <EMAIL>, or drop the row."""
    pii_kinds: tuple[PIIKind, ...] = ("email", "phone", "card", "iban", "ip")
    """What `pii` looks for."""
    pii_names: str = ""
    """A package with a spaCy model, as en_core_web_lg, with which Presidio also finds names of people and places."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if self.pii_names and self.pii == "keep":
            raise ValueError('pii_names needs pii = "replace" or "drop"')
        return self
