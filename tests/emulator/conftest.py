"""These tests run in a generated project's environment, which has moto, psutil and Ray: see `test` in tasks.py."""

import signal

# a shell may start these tests with both signals ignored, and child processes would inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
