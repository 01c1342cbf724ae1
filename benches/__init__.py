"""Benchmarks: each figure beside its floor or a peer in the same run."""
