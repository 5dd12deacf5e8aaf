"""What a call has committed: sequences row by row, what stops them, and the records that were asked for."""

from __future__ import annotations

import torch
from torch import nn
from transformers.generation import stopping_criteria as stopping


class Rows:
    """Committed sequences of a call, what stops them, and the outputs asked for."""

    def __init__(self, input_ids, criteria, generation_config, streamer):
        self.tokens = list(input_ids)  # one [length] tensor a row, left padding included
        self._buffers: list[torch.Tensor | None] = [None] * len(self.tokens)  # what they are the beginnings of
        self.prompt_length = input_ids.shape[1]
        self.max_length = generation_config.max_length
        self.streamer = streamer
        self.keep_scores = generation_config.return_dict_in_generate and generation_config.output_scores
        self.keep_logits = generation_config.return_dict_in_generate and generation_config.output_logits
        self.scores: list[list[torch.Tensor]] = [[] for _ in self.tokens]
        self.logits: list[list[torch.Tensor]] = [[] for _ in self.tokens]
        self.eos, others = set(), []
        for criterion in criteria:
            if type(criterion) is stopping.EosTokenCriteria:
                self.eos |= set(criterion.eos_token_id.flatten().tolist())
            elif type(criterion) is stopping.MaxLengthCriteria:
                self.max_length = min(self.max_length, criterion.max_length)
            else:
                others.append(criterion)
        self.others = stopping.StoppingCriteriaList(others)

    def room(self, row: int) -> int:
        """Tokens the row may still get."""
        return self.max_length - len(self.tokens[row])

    def commit(
        self, row: int, new: torch.Tensor, listed: list[int], scores: torch.Tensor, logits: torch.Tensor
    ) -> tuple[int, bool]:
        """Append tokens `[k]`, `listed` on the host, up to and including the first that stops the row.

        Returns how many were kept and whether the row is done. Stops are looked for after every token, because that is
        where plain decoding looks: a criterion may read only the last token, or count its calls.
        """
        kept, done = len(listed), False
        for i, token in enumerate(listed):
            if token in self.eos or len(self.tokens[row]) + i + 1 >= self.max_length:
                kept, done = i + 1, True
                break
        if self.keep_scores:
            self.scores[row] += list(scores[:kept])
        if self.keep_logits:
            self.logits[row] += list(logits[:kept])
        if self.others:
            start = len(self.tokens[row])
            whole = torch.cat([self.tokens[row], new[:kept]])
            for i in range(kept):
                seen = None
                if self.keep_scores:
                    seen = tuple(x[None] for x in self.scores[row][: start - self.prompt_length + i + 1])
                # A criterion may know the rows by number, so it gets a whole batch and answers for this row.
                batch = whole[None, : start + i + 1].expand(len(self.tokens), -1)
                if bool(self.others(batch, seen)[row]):
                    kept, done = i + 1, True
                    break
            del self.scores[row][start - self.prompt_length + kept :]
            del self.logits[row][start - self.prompt_length + kept :]
        self._append(row, new[:kept])
        if self.streamer is not None:
            for token in new[:kept].cpu():
                self.streamer.put(token[None])
        return kept, done

    def _append(self, row: int, new: torch.Tensor) -> None:
        """Write into spare room behind the row's tokens, which double it when there is none left."""
        tokens, buffer = self.tokens[row], self._buffers[row]
        start, end = len(tokens), len(tokens) + len(new)
        if buffer is None or len(buffer) < end:
            buffer = tokens.new_empty(2 * end)
            buffer[:start] = tokens
            self._buffers[row] = buffer
        buffer[start:end] = new
        self.tokens[row] = buffer[:end]

    def sequences(self, pad_token_id) -> torch.LongTensor:
        """All rows as one tensor, padded on the right."""
        pad = 0 if pad_token_id is None else int(pad_token_id)
        return nn.utils.rnn.pad_sequence(self.tokens, batch_first=True, padding_value=pad)

    @staticmethod
    def per_step(kept: list[list[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
        """Step-wise `[batch, V]` tensors, zeros after a row's end."""
        steps = max(map(len, kept))
        blank = torch.zeros_like(kept[0][0])
        return tuple(torch.stack([row[i] if i < len(row) else blank for row in kept]) for i in range(steps))


class Extras:
    """Hidden states and attentions in plain decoding's layout: one entry a token, the prompt in the first."""

    def __init__(self, generation_config):
        wanted = generation_config.return_dict_in_generate
        self.hidden_states = () if wanted and generation_config.output_hidden_states else None
        self.attentions = () if wanted and generation_config.output_attentions else None
        self.forward_kwargs = {}
        if self.hidden_states is not None:
            self.forward_kwargs["output_hidden_states"] = True
        if self.attentions is not None:
            self.forward_kwargs["output_attentions"] = True

    def add(self, outputs, kept: int, prefill: bool = False) -> None:
        """Take the entries of the forward's first `kept` positions."""
        if self.hidden_states is not None:
            if prefill:
                self.hidden_states += (outputs.hidden_states,)
            else:
                for i in range(kept):
                    self.hidden_states += (tuple(layer[:, i : i + 1] for layer in outputs.hidden_states),)
        if self.attentions is not None:
            if prefill:
                self.attentions += (outputs.attentions,)
            else:
                block = outputs.attentions[0].shape[2]
                for i in range(kept):
                    past = block - 1 - i  # columns of later block positions
                    self.attentions += (
                        tuple(layer[:, :, i : i + 1, : layer.shape[3] - past] for layer in outputs.attentions),
                    )
