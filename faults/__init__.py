"""Fault tests inject faults into a project's cluster on an emulated AWS, and check how the cluster handles each one.

`./inv faults` generates a project and runs the tests in its folder and environment.
"""
