"""The private Ray modules and attributes that this project uses, in one small module per area of Ray.

Ray may change a private API in any release. Each docstring names the APIs that the code relies on, and the Ray version
with which they were checked. After a Ray upgrade, run tests/integration/test_private_ray_apis.py, which has one test
per module.
"""
