"""Measurements: `python -m domino_spec.benchmarks.compare` and its neighbours."""
