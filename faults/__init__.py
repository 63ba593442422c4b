"""Fault tests: they inject faults into an emulated AWS, and check how a project's cluster handles each.

`./inv faults` makes a project and runs them there, in the project's environment.
"""
