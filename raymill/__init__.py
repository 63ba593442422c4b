"""The library of Raymill: the code behind a project's jobs and verbs."""

__version__ = "1.0.0"
