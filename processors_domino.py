"""`generate`'s logits processors on rows of different lengths: what kinds there are, and how each is applied."""

from __future__ import annotations

import torch
from transformers.generation import logits_process

# Processors that look at the logits alone: all rows and positions go through them in one call.
PREFIX_FREE = tuple(
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
        "SuppressTokensLogitsProcessor",
    )
)
# Of these, the ones that treat all ids alike: what they make of some logits does not hang on ids without a chance.
VALUES_ONLY = tuple(kind for kind in PREFIX_FREE if kind is not logits_process.SuppressTokensLogitsProcessor)
# Processors that know rows by their number in the batch; a caller's own may, so they count among these.
ROW_NUMBERED = (
    logits_process.PrefixConstrainedLogitsProcessor,
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.EncoderRepetitionPenaltyLogitsProcessor,
    logits_process.EncoderNoRepeatNGramLogitsProcessor,
)
# Processors with a memory of the calls made to them: they may only ever see committed prefixes, each once.
STATEFUL = (
    logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    logits_process.SynthIDTextWatermarkLogitsProcessor,
)


class RowProcessors:
    """`generate`'s logits processors, applied to rows of different lengths, each with exactly its own prefix."""

    def __init__(self, processors, batch_size: int):
        self.processors = logits_process.LogitsProcessorList(processors)
        self.batch_size = batch_size
        self.active = list(range(batch_size))
        self.prefix_free = all(type(processor) in PREFIX_FREE for processor in processors)
        self.row_numbered = batch_size > 1 and any(
            isinstance(x, ROW_NUMBERED) or type(x).__module__ != logits_process.__name__ for x in processors
        )
        self.stateful = any(isinstance(x, STATEFUL) for x in processors)

    def __bool__(self) -> bool:
        return len(self.processors) > 0

    def __call__(self, rows: list[torch.Tensor], logits: torch.Tensor) -> torch.Tensor:
        """Processed logits `[batch, V]` given one committed-or-drafted prefix `[length]` a row."""
        if not self.processors:
            return logits
        if self.prefix_free:
            return self.processors(rows[0][None], logits)
        lengths = {len(row) for row in rows}
        if len(lengths) == 1 and len(rows) == self.batch_size:
            return self.processors(torch.stack(rows), logits)
        return torch.cat([self._one_row(i, row[None], logits[i : i + 1]) for i, row in enumerate(rows)])

    def _one_row(self, i: int, row: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        if not self.row_numbered:
            return self.processors(row, logits)
        number = self.active[i]
        batch = row.expand(self.batch_size, -1).contiguous(), logits.repeat(self.batch_size, 1)
        return self.processors(*batch)[number : number + 1]


def reads_values_only(processors) -> bool:
    """Whether all of a `RowProcessors`, or of any list, may be given the logits of some ids instead of all."""
    listed = processors.processors if isinstance(processors, RowProcessors) else processors
    return all(type(processor) in VALUES_ONLY for processor in listed)


def process_logits(processors, rows: list[torch.Tensor], logits: torch.Tensor) -> torch.Tensor:
    """Apply a `RowProcessors`, or any list of processors, to logits `[batch, V]` of rows with these prefixes."""
    if not isinstance(processors, RowProcessors):
        processors = RowProcessors(processors, len(rows))
    return processors(rows, logits)
