"""The list of API keys in the project's .env."""

from dotenv import dotenv_values, set_key

import settings
from pipeline.serving.keys import OTHERS_SECRET


class EnvFile:
    """Reads and changes SERVE_API_KEYS in .env. The rest of the file stays as it is."""

    name = ".env"

    def read(self) -> str:
        """Return the value, or "" if it has none.

        Raises:
            UserError: there is no .env.
        """
        file = settings.PROJECT / ".env"
        if not file.is_file():
            raise settings.UserError("there is no .env, which stores the keys. Run: inv up")
        return dotenv_values(file).get(OTHERS_SECRET) or ""

    def write(self, value: str) -> None:
        """Replace the value."""
        set_key(settings.PROJECT / ".env", OTHERS_SECRET, value, follow_symlinks=True)
