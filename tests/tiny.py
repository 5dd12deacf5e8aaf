"""Tiny targets and drafters, and the drafters whose every proposal a test controls: ORACLE, WRONG, HALF."""

import torch
from domino_spec import DominoConfig, DominoForSpeculation, DraftOutput
from domino_spec.training.data import BlockCollator, first_anchors, sample_anchors
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCAB = 64
MASK_ID = 60
BLOCK = 6
FAMILIES = ("qwen3", "llama")
# Full attention, sliding windows, and both in turn; windows shorter than the texts.
ATTENTIONS = {
    "qwen3": {},
    "llama": {},
    "mistral": {"sliding_window": 8},
    "gemma3_text": {
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 8,
    },
}


def make_target(family: str = "llama", seed: int = 0, **overrides):
    """Tiny fp32 target: 4 layers, hidden 32, vocabulary 64; weights wide enough that its choices are clear."""
    torch.manual_seed(seed)
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "bos_token_id": 61,
        "eos_token_id": None,
        "pad_token_id": 62,
    } | overrides
    config = CONFIG_MAPPING[family](**fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    model.generation_config.pad_token_id = config.pad_token_id
    model.generation_config.eos_token_id = config.eos_token_id
    return model


def make_drafter(target, seed: int = 1, trained_head: bool = True, schedule: str = "constant", **overrides):
    """Tiny drafter for `target`; its head is filled with noise, since a fresh one corrects nothing.

    Constant length unless asked otherwise: most tests say which drafts they want to see judged.
    """
    torch.manual_seed(seed)
    fields = {"num_hidden_layers": 2, "block_size": BLOCK, "mask_token_id": MASK_ID}
    fields |= {"head_hidden_size": 16, "head_rank": 8, "initializer_range": 0.2} | overrides
    drafter = DominoForSpeculation(DominoConfig.from_target(target.config, **fields)).eval()
    if trained_head:
        torch.nn.init.normal_(drafter.embed_proj[2].weight, std=0.5)
    drafter.generation_config.num_assistant_tokens_schedule = schedule
    return drafter


def prompt_ids(length: int = 7, batch: int = 1, seed: int = 3) -> torch.Tensor:
    """Random prompt without special ids, `[batch, length]`."""
    return torch.randint(0, 58, (batch, length), generator=torch.Generator().manual_seed(seed))


def ragged(lengths, seed: int = 5) -> dict[str, torch.Tensor]:
    """Left-padded prompts of these lengths with their mask."""
    width = max(lengths)
    ids, mask = torch.full((len(lengths), width), 62), torch.zeros(len(lengths), width, dtype=torch.long)
    for i, length in enumerate(lengths):
        ids[i, width - length :] = prompt_ids(length, seed=seed + i)[0]
        mask[i, width - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def control(drafter, propose, cut: int | None = None):
    """Replace `draft` on the instance: `propose(sequence) -> n tokens` for every row."""

    def draft(target, anchor_ids, context_hidden_states, cache, *, input_ids, max_drafts, **kwargs):
        n = min(max_drafts, drafter.config.num_drafts if cut is None else cut)
        tokens = [propose(row, n) for row in input_ids]
        return DraftOutput(torch.tensor(tokens, dtype=torch.long).view(len(tokens), n))

    drafter.draft = draft
    return drafter


class Continuations:
    """The target's own greedy continuation of any prefix, decoded plainly and remembered along the way."""

    def __init__(self, target, **kwargs):
        self.target, self.kwargs, self.known, self.shortest = target, kwargs, {}, None

    def __call__(self, row, n: int) -> list[int]:
        """The next `n` greedy tokens after `row`, left padding masked."""
        key = tuple(row.tolist())
        self.shortest = len(row) if self.shortest is None else min(len(row), self.shortest)
        # From a prompt look far ahead; a longer prefix that is unknown has left the greedy path for good.
        ahead = 24 if len(row) == self.shortest else 0
        if n and len(self.known.get(key, ())) < n:
            output = self.target.generate(
                row[None],
                attention_mask=((row != self.target.config.pad_token_id).cumsum(0) > 0).long()[None],
                max_new_tokens=n + ahead,
                do_sample=False,
                **self.kwargs,
            )
            new = output[0, len(row) :].tolist()
            for i in range(len(new)):
                self.known[key + tuple(new[:i])] = new[i:]
        tokens = self.known.get(key, [])[:n]
        return tokens + [0] * (n - len(tokens))


def scripted(drafter, kind: str, target, **kwargs):
    """ORACLE proposes the target's own continuation, WRONG never a right token, HALF two right ones and then wrong."""
    right = Continuations(target, **kwargs)

    def propose(row, n):
        tokens = right(row, n)
        keep = {"oracle": n, "wrong": 0, "half": 2}[kind]
        return [token if i < keep else (token + 1) % 58 for i, token in enumerate(tokens)]

    return control(drafter, propose)


def mixed(drafter, texts, pattern=(3, 0, 5, 1, 6, 2)):
    """Proposals out of the rows' plain `texts`; how many are right hangs on the text's last token and length."""
    known = [text.tolist() for text in texts]

    def propose(row, n):
        row = row.tolist()
        right = next((text[len(row) :] for text in known if text[: len(row)] == row), [])
        keep = min(n, len(right), pattern[(row[-1] + len(row)) % len(pattern)])
        right = (right + [0] * n)[:n]
        return [token if i < keep else (token + 1) % 58 for i, token in enumerate(right)]

    return control(drafter, propose)


def one_row(target, length: int = 40, prompt: int = 7):
    """A row as decoding writes it, for training and for simulated rounds."""
    ids = target.generate(prompt_ids(prompt), max_new_tokens=length - prompt, do_sample=False)
    return {"input_ids": ids[0].tolist(), "supervised": [0] * prompt + [1] * (length - prompt)}


def batch_of(*rows) -> dict[str, torch.Tensor]:
    return BlockCollator(62)(list(rows))


def drawn(batch, num_anchors: int = 8, generator=None) -> dict[str, torch.Tensor]:
    """A batch with its anchors, as the trainer gives it to the objective."""
    anchors, kept = sample_anchors(first_anchors(batch["supervised"]), num_anchors, generator)
    return batch | {"anchors": anchors, "kept": kept}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A word a token, w0 to w63, with a chat template without generation tags."""
    words = {f"w{i}": i for i in range(VOCAB)}
    inner = Tokenizer(models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="w62", eos_token="w63", bos_token="w61")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'w50 ' if m['role'] == 'user' else 'w52 ' }}{{ m['content'] }} w63 {% endfor %}"
        "{% if add_generation_prompt %}w52 {% endif %}"
    )
    return tokenizer


def save_target(directory, family: str = "llama", **overrides):
    """A tiny target and its tokenizer as a directory, for command lines; returns the target."""
    target = make_target(family, **overrides)
    target.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return target
