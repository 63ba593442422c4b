"""Test that the scripts of the chat page are the published ones, and that HTML can contain them."""

import hashlib
import json
import re

from raymill.serving.page import FOLDER, HTML

PACKAGES = json.loads((FOLDER / "third_party" / "packages.json").read_text(encoding="utf-8"))
FILES = {name: file for package in PACKAGES.values() for name, file in package["files"].items()}


def test_the_scripts_and_licenses_are_the_published_ones() -> None:
    """The template's `./inv lock` compares the packages with those on npm."""
    stored = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (FOLDER / "third_party").iterdir()}
    del stored["packages.json"]
    assert stored == {name: file["sha256"] for name, file in FILES.items()}
    for name in PACKAGES:
        assert f"{name}.LICENSE" in FILES


def test_the_page_contains_the_published_scripts() -> None:
    scripts = re.findall("<script>(.*?)</script>", HTML, re.DOTALL)
    for name in FILES:
        if name.endswith(".js"):
            text = (FOLDER / "third_party" / name).read_text(encoding="utf-8")
            assert text in scripts
            assert "\r" not in text  # HTML has no carriage returns, so the script's hash would be wrong
            # In HTML, `<script` after `<!--` hides the end of the element. The scripts contain `<!--`.
            assert not re.search("</?script", text, re.IGNORECASE)
    assert HTML.count("<script") == len(scripts) == 3
