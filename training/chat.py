"""Chats as token ids: prompts to answer, and which tokens of a finished chat the target would have written."""

from __future__ import annotations

from jinja2 import TemplateError


def fold_system(messages: list[dict]) -> list[dict]:
    """The system message as the beginning of the first user message, for templates that have no place for it."""
    system, first, *rest = messages
    return [{**first, "content": f"{system['content']}\n\n{first['content']}"}, *rest]


def render(messages: list[dict], tokenizer, row: dict, kwargs: dict | None, generation_prompt: bool) -> list[int]:
    """Token ids of a chat under the tokenizer's template.

    Args:
        row: its `tools` and `chat_template_kwargs` columns, where it has them, go to the template as they do in TRL.
        kwargs: template options of the whole run, like `{"enable_thinking": False}`; a row's own come first.
    Raises:
        ValueError: the template refuses the chat, also with the system message folded into the first user message.
    """
    options = (kwargs or {}) | (row.get("chat_template_kwargs") or {})
    if row.get("tools"):
        options["tools"] = row["tools"]

    def apply(chat):
        return tokenizer.apply_chat_template(
            chat, add_generation_prompt=generation_prompt, return_dict=True, **options
        )["input_ids"]

    try:
        return apply(messages)
    except TemplateError as error:
        if len(messages) > 1 and messages[0]["role"] == "system" and messages[1]["role"] == "user":
            try:
                return apply(fold_system(messages))
            except TemplateError:
                pass
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(
            f"the chat template refuses a chat of {roles}: {error}; change the rows, or the tokenizer's template."
        ) from None


def final_marks(tokenizer) -> set[int]:
    """Ids that can end a turn: end of sequence, and whatever the tokenizer adds as special."""
    return {tokenizer.eos_token_id, *(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)}


def supervise_turns(
    messages: list[dict], tokenizer, row: dict, kwargs: dict | None = None, first: int = 0
) -> list[dict[str, list[int]]]:
    """The chat with its assistant turns supervised, from message `first` on and up to their end-of-turn token.

    Turns are found by rendering prefixes of the chat, which needs no generation tags in the template. Templates that
    drop earlier thinking render a turn otherwise once more turns follow: such a turn comes as a chat of its own, which
    ends with it, as it did when it was written.

    Returns:
        the whole chat first, then the chats that end earlier; each with `input_ids` and `supervised`.
    """
    marks = final_marks(tokenizer)
    ids = render(messages, tokenizer, row, kwargs, False)
    rows = [{"input_ids": ids, "supervised": [0] * len(ids)}]
    for i, message in enumerate(messages):
        # A turn without anything before it has no prompt to be rendered, and nothing to be drafted from.
        if message["role"] != "assistant" or i < first or i == 0:
            continue
        prompt = render(messages[:i], tokenizer, row, kwargs, True)
        turn = render(messages[: i + 1], tokenizer, row, kwargs, False)
        if turn[: len(prompt)] != prompt:
            continue
        start, end = len(prompt), len(turn)
        # What a template puts behind the end-of-turn token the target never writes.
        ends = [j for j in range(start, end) if turn[j] in marks]
        end = ends[-1] + 1 if ends else end
        if ids[: len(turn)] != turn:
            rows.append({"input_ids": turn[:end], "supervised": [0] * start + [1] * (end - start)})
        else:
            rows[0]["supervised"][start:end] = [1] * (end - start)
    return rows
