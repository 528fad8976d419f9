"""The cache format and the operator in NumPy: what the tests compare the kernels with.

Written from the contract (docs/format.md), not from the C++.
"""
