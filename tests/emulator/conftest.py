"""These tests run in a generated project's environment, which has moto, psutil and Ray: see `test` in tasks.py."""

import signal

# Shells start background processes with both signals ignored. Child processes would inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
