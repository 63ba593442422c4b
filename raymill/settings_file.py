"""Write values to settings.toml."""

from collections.abc import Mapping
from pathlib import Path

import tomlkit

from raymill import state_files


def write(sections: Mapping[str, Mapping[str, float | bool | str]], file: Path) -> None:
    """Write the values that differ from those in effect. Keep the file's comments and order.

    The keys of `sections` are names such as "cluster.train".
    """
    document = tomlkit.parse(file.read_text(encoding="utf-8-sig"))
    for section, values in sections.items():
        profile, name = section.split(".")
        shared, own = document.get(name, {}), document[profile][name]  # type: ignore[index]
        for key, value in values.items():
            if own.get(key, shared.get(key)) != value:  # type: ignore[union-attr]
                own[key] = value  # type: ignore[index]
    state_files.replace(file, tomlkit.dumps(document))
