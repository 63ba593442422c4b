"""The verbs: inv VERB [--target TARGET]. Options of a job come after --. `inv --list` lists all verbs.

Most are in raymill/verbs.py. Add your own here, or define one of the same name to replace it.
"""

from raymill import environment

environment.enter()  # creates .venv on first use; after this line, all packages can be imported

from raymill.verbs import *

# @verb(name="whom to greet")
# def hello(context: Context, name: str = "world") -> None:
#     """Say hello."""
#     print(f"hello {name}")

start(__name__)
