"""Test settings.toml: every name in it is known, and every value is valid, on this machine and on the cluster."""

import pytest

from raymill import sections, settings


def test_every_section_and_key_is_known() -> None:
    sections.check()


@pytest.mark.parametrize("profile", settings.PROFILES)
@pytest.mark.parametrize("entry", sections.SECTIONS, ids=lambda entry: entry.name)
def test_every_value_is_valid(entry: sections.Entry, profile: str) -> None:
    if profile not in entry.profiles:
        pytest.skip(f"[{entry.name}] is read only in the profile {entry.profiles[0]}")
    assert settings.load(entry.load_type(), *entry.names, profile=profile)
