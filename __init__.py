"""Domino: speculative decoding with a parallel drafter and a causal correction head."""

from .configuration_domino import DominoConfig, DominoGenerationConfig
from .generation_domino import install_dispatch, remove_dispatch
from .modeling_domino import DominoCache, DominoForSpeculation
from .speculation_domino import DraftOutput, SpeculationStats

__all__ = [
    "DominoCache",
    "DominoConfig",
    "DominoForSpeculation",
    "DominoGenerationConfig",
    "DraftOutput",
    "SpeculationStats",
    "install_dispatch",
    "remove_dispatch",
]
