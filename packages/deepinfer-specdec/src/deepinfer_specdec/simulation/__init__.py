"""Checks and simulations of policies: exact enumeration of the output distribution, and throughput on measured cost
curves.
"""
