"""Continuations of what the text has said before: proposals that cost no forward of the drafter."""

from __future__ import annotations

# Matched suffixes, longest first: three tokens are seldom wrong, two are found more often.
SUFFIX_SIZES = (3, 2)


class NgramIndex:
    """Where each n-gram of one row was last followed by something; grows by what is committed, never rescans.

    Args:
        text (list[int]): the prompt, without padding.
    """

    def __init__(self, text: list[int]):
        self.text: list[int] = []
        self._followed_at: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in SUFFIX_SIZES}
        self.extend(text)

    def extend(self, tokens: list[int]) -> None:
        """Take in committed tokens."""
        for token in tokens:
            end = len(self.text)
            for size, places in self._followed_at.items():
                if end >= size:
                    places[tuple(self.text[end - size :])] = end
            self.text.append(token)

    def continuation(self, most: int) -> tuple[int, list[int]]:
        """What followed the longest suffix that occurred before: its size, 0 without any, and `most` tokens.

        A continuation that reaches the end of the text goes on with its own beginning, so a loop is proposed whole.
        """
        for size in SUFFIX_SIZES:
            place = self._followed_at[size].get(tuple(self.text[-size:])) if len(self.text) >= size else None
            if place is not None:
                period = len(self.text) - place
                return size, [self.text[place + i % period] for i in range(most)]
        return 0, []
