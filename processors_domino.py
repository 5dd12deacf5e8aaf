"""Which of `generate`'s logits processors a draft may go through.

Verification calls every processor as plain decoding does. Drafting looks ahead, so it calls only processors of the
library that have no memory and run no code of the caller's.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process, stopping_criteria

# Processors whose result for an id depends on the logits alone and treats all ids alike: a pool of ids will do.
VALUES_ONLY = tuple(
    getattr(logits_process, name)
    for name in (
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
    )
)
# Processors that remember calls, run forwards of their own, or call a function of the user's.
NOT_FOR_DRAFTS = (
    logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    logits_process.SynthIDTextWatermarkLogitsProcessor,
    logits_process.PrefixConstrainedLogitsProcessor,
)


class DraftProcessors:
    """Those of a call's processors that drafts go through, in their order.

    Args:
        processors: as `generate` prepared them, or any list.

    Attributes:
        values_only (bool): whether logits of a few ids may stand for those of all.
    """

    def __init__(self, processors: Iterable):
        ours = [p for p in processors if type(p).__module__ == logits_process.__name__]
        self.processors = LogitsProcessorList(p for p in ours if not isinstance(p, NOT_FOR_DRAFTS))
        self.values_only = all(type(p) in VALUES_ONLY for p in self.processors)

    def __bool__(self) -> bool:
        return len(self.processors) > 0

    def __call__(self, input_ids: torch.LongTensor, logits: torch.Tensor) -> torch.Tensor:
        """Processed logits `[batch, V]` behind prefixes `[batch, length]`; `logits` stays as it is."""
        return self.processors(input_ids, logits.clone()) if self.processors else logits

    def without_prefixes(self) -> DraftProcessors:
        """Those that need no prefix."""
        return DraftProcessors(p for p in self.processors if type(p) in VALUES_ONLY)


def all_from_library(processors: Iterable, criteria: Iterable) -> bool:
    """Whether no code of the caller's looks at the scores: rows that are done may then hold anything."""
    library = (logits_process.__name__, stopping_criteria.__name__)
    return all(type(x).__module__ in library for x in [*processors, *criteria])
