"""Test settings.toml: every name in it is known, and every value is valid, on this machine and on the cluster."""

import pytest

from raymill import sections, settings


def test_every_section_and_key_is_known() -> None:
    sections.check()


@pytest.mark.parametrize(
    ("entry", "profile"),
    [
        pytest.param(entry, profile, id=f"{profile}.{entry.name}")
        for entry in sections.all_entries()
        for profile in entry.profiles
    ],
)
def test_every_value_is_valid(entry: sections.Entry, profile: str) -> None:
    assert settings.load(entry.load_type(), *entry.names, profile=profile)
