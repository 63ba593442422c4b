"""Every private Ray API that this project uses, one small module per area of Ray.

Ray may change a private API in any release. Each docstring names what it relies on and the Ray version in which it was
checked. After a Ray upgrade, run tests/integration/test_private_ray_apis.py: it has one test per module.
"""
