"""Fault tests inject faults into an emulated AWS, and check how a project's cluster handles each fault.

`./inv faults` generates a project and runs the tests there, in the project's environment.
"""
