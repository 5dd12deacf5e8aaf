"""Speculative decoding with a Domino drafter: the decode loop, and the way in from `generate`.

The loop works on rows that may differ in length. Each round:

    draft    [anchor] -> d1..dn            (`drafter.draft`, the only source of proposals)
    verify   target([anchor, d1..dn])      (one forward; tapped layers are captured by hooks)
    accept   leading drafts that the target agrees with, plus its own bonus token, the next anchor
    commit   row by row, cut at whatever would have stopped plain decoding
    roll     caches keep committed positions only

Which rows draft how many tokens, and from where, is the adaptive length's choice (`length_domino`); how the target's
cache keeps rows of different lengths without copying them is told in `target_domino`.

Takes draft and target as arguments and imports neither modeling nor training code.
"""

from __future__ import annotations

import functools
import time

import torch
from transformers import DynamicCache, GenerationConfig, GenerationMixin
from transformers.generation import GenerationMode
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .length_domino import AdaptiveLength, ConstantLength, NgramIndex, Plan
from .processors_domino import RowProcessors
from .rows_domino import Extras, Rows
from .speculation_domino import (
    DraftOutput,
    SpeculationStats,
    accept_greedy,
    accept_sampled,
    sample_from_logits,
)
from .target_domino import TappedStates, cache_key, compact, growing, position_limit, settle, tapped_states

# Columns of tapped states that plain steps may pile up before the drafter takes them in.
MOST_BACKLOG = 128

# Inputs that give positions another meaning than the count of tokens.
MULTIMODAL_INPUTS = ("pixel_values", "pixel_values_videos", "image_embeds", "input_features", "input_values")

# The loop -------------------------------------------------------------------------------------------------------


def _check_call(target, input_ids, generation_config, streamer, synced_gpus, model_kwargs) -> None:
    """One sentence for what this loop cannot do, before anything runs."""
    batch_size, length = input_ids.shape
    cache, embeds = model_kwargs.get(cache_key(target, model_kwargs)), model_kwargs.get("inputs_embeds")
    passed_length = cache.get_seq_length() if cache is not None else 0
    if target.config.is_encoder_decoder:
        raise ValueError(f"{type(target).__name__} is an encoder-decoder; Domino drafts for decoder-only models.")
    if length == 0 and embeds is None:
        raise ValueError("the prompt is empty; pass at least one token, for example the tokenizer's bos_token.")
    if not generation_config.use_cache:
        raise ValueError("speculative decoding needs the target's cache; leave use_cache at True.")
    if synced_gpus:
        raise ValueError("speculative decoding does not keep ZeRO-3 or FSDP peers in step; pass synced_gpus=False.")
    if not isinstance(cache, DynamicCache) or not getattr(cache, "is_croppable", True):
        raise ValueError(
            f"speculative decoding needs a DynamicCache of attention layers, which can forget rejected tokens, got "
            f"{type(cache).__name__} for {type(target).__name__}; leave cache_implementation unset, and generate "
            "without assistant_model where the target keeps a recurrent state."
        )
    if batch_size > 1 and streamer is not None:
        raise ValueError(f"a streamer prints one sequence, got a batch of {batch_size}; stream one prompt at a time.")
    if batch_size > 1 and passed_length:
        raise ValueError("a filled cache can be continued for one sequence at a time; pass the batch without it.")
    if batch_size > 1 and generation_config.return_dict_in_generate:
        if generation_config.output_hidden_states or generation_config.output_attentions:
            raise ValueError("hidden states and attentions can be returned for one sequence at a time.")
    limit = position_limit(target)
    if limit and length >= limit:
        raise ValueError(f"the prompt has {length} tokens and the target only {limit} positions; shorten the prompt.")


@torch.no_grad()
def speculative_decode(
    target,
    drafter,
    input_ids: torch.LongTensor,
    logits_processor=None,
    stopping_criteria=None,
    generation_config: GenerationConfig | None = None,
    synced_gpus: bool = False,
    streamer=None,
    **model_kwargs,
):
    """Decode with drafts; what `generate(assistant_model=drafter)` runs once its inputs are prepared.

    Args:
        target: the model whose text comes out.
        drafter: anything with `draft`, `new_cache`, `config` and `generation_config` like `DominoForSpeculation`'s.
        input_ids (int `[batch, length]`): left-padded prompts.
        logits_processor, stopping_criteria, generation_config, streamer, model_kwargs: as `generate` prepared them.
    Returns:
        int `[batch, length + new]`, or a `GenerateDecoderOnlyOutput`; statistics are in `drafter.last_speculation`.
    Raises:
        ValueError: a call that speculation cannot serve exactly.
    """
    started = time.perf_counter()
    for unused in ("inputs_tensor", "tokenizer", "assistant_tokenizer", "assistant_model"):
        model_kwargs.pop(unused, None)
    drafter.generation_config.check()
    for name in MULTIMODAL_INPUTS:
        if model_kwargs.get(name) is not None:
            raise ValueError(f"the drafter reads text only, got {name}; generate without assistant_model.")
    _check_call(target, input_ids, generation_config, streamer, synced_gpus, model_kwargs)
    processors = RowProcessors(logits_processor if logits_processor is not None else [], input_ids.shape[0])
    if processors.stateful and input_ids.shape[0] > 1:
        raise ValueError("guidance and SynthID watermarks remember their calls; generate one sequence at a time.")
    rows = Rows(input_ids, stopping_criteria or [], generation_config, streamer)
    with tapped_states(target, drafter.config.target_layer_ids) as taps:
        call = _Call(target, drafter, rows, processors, generation_config, taps)
        call.prefill(input_ids, model_kwargs)
        with growing(call.cache):
            while call.drop_finished_rows():
                call.round()
    if streamer is not None:
        streamer.end()
    call.stats.total_seconds = time.perf_counter() - started
    sequences = rows.sequences(generation_config._pad_token_tensor)
    if not generation_config.return_dict_in_generate:
        return sequences
    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=rows.per_step(rows.scores) if rows.keep_scores else None,
        logits=rows.per_step(rows.logits) if rows.keep_logits else None,
        attentions=call.extras.attentions,
        hidden_states=call.extras.hidden_states,
        **{call.key: call.cache if len(rows.tokens) == 1 else None},
    )


class _Backlog:
    """Tapped states committed since the drafter last took some in.

    Args:
        states (float `[b, new, T * H]`): of one forward.
        valid (bool `[b, new]`, optional): which are a row's own; None: all.
    """

    def __init__(self, states: torch.Tensor, valid: torch.Tensor | None):
        self.states, self.valid = [states], [valid]

    @property
    def length(self) -> int:
        return sum(part.shape[1] for part in self.states)

    def add(self, states: torch.Tensor, valid: torch.Tensor | None) -> None:
        self.states.append(states)
        self.valid.append(valid)

    def take(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """All of it; nothing is left."""
        states, valid = self.states, self.valid
        nothing = states[0].new_empty(len(states[0]), 0, states[0].shape[2])  # no view: it would keep it all
        self.states, self.valid = [nothing], [None]
        joined = torch.cat(states, dim=1)
        if all(part is None for part in valid):
            return joined, None
        every = [
            state.new_ones(state.shape[:2], dtype=torch.bool) if part is None else part
            for state, part in zip(states, valid, strict=True)
        ]
        return joined, torch.cat(every, dim=1)

    def select(self, index: torch.Tensor) -> None:
        self.states = [part[index] for part in self.states]
        self.valid = [None if part is None else part[index] for part in self.valid]


class _Call:
    """One `generate` call: the rows still being written, what they carry from round to round, and the round itself."""

    def __init__(self, target, drafter, rows: Rows, processors: RowProcessors, generation_config, taps: TappedStates):
        self.target, self.drafter, self.rows = target, drafter, rows
        self.processors, self.generation_config, self.taps = processors, generation_config, taps
        self.do_sample = generation_config.do_sample
        self.knobs = drafter.generation_config
        self.extras = Extras(generation_config)
        batch_size = len(rows.tokens)
        self.stats = SpeculationStats([[] for _ in rows.tokens], accepted_drafts=[[] for _ in rows.tokens])
        drafter.last_speculation = self.stats
        self.most_positions = position_limit(target)
        most = self.knobs.num_assistant_tokens
        self.limit = drafter.config.num_drafts if most is None else most
        self.device = rows.tokens[0].device
        self.active = list(range(batch_size))
        self.adaptive = self.knobs.num_assistant_tokens_schedule == "adaptive"
        self.lengths = ConstantLength()
        if self.adaptive:
            self.limit = min(self.limit, drafter.config.num_drafts)
            circumstances = (batch_size, self.limit, self.device.type, target.dtype, drafter.dtype)
            circumstances += (torch.get_num_threads(), self.knobs.use_head, self.knobs.candidate_pool_size)
            sampled = (drafter, target, *circumstances) if self.do_sample else None
            self.lengths = AdaptiveLength(batch_size, self.limit, sampled)
        self.indexes: list[NgramIndex] | None = None

    def prefill(self, input_ids: torch.LongTensor, model_kwargs: dict) -> None:
        """As plain decoding does it, and the first token."""
        started = time.perf_counter()
        self.key = cache_key(self.target, model_kwargs)
        outputs = self.target._prefill(input_ids, self.generation_config, model_kwargs)
        self.cache = outputs[self.key]
        context = self.taps.take()  # [b, prompt positions without states of a passed cache, T * H]
        mask = model_kwargs.get("attention_mask")
        if mask is None:
            mask = input_ids.new_ones(len(input_ids), self.cache.get_seq_length())
        # Columns of the target's cache that are a row's own, [b, columns]; None below where there are no others.
        self.mask = mask.to(self.device).bool()
        self.filled: list[int] = self.mask.sum(-1).tolist()  # columns of each active row
        # The caller may count positions in another way than by tokens.
        given = model_kwargs.get("position_ids")
        self.lead = [0] * len(input_ids)
        if given is not None and given.dim() == 2:
            self.lead = (given[:, -1] + 1 - self.mask.sum(-1)).tolist()
        valid = self.mask[:, -context.shape[1] :]
        self.backlog = _Backlog(context, None if bool(valid.all()) else valid)
        self.draft_cache = self.drafter.new_cache(
            len(input_ids), (self.mask.sum(-1) - valid.sum(-1)).to(self.drafter.device)
        )
        if self.adaptive and self.knobs.lookup and not self.processors.stateful:
            self.indexes = [NgramIndex(row) for row in self._prompts(input_ids)]
        logits = outputs.logits[:, -1].to(device=self.device, dtype=torch.float32, copy=True)
        self.extras.add(outputs, 1, prefill=True)
        scores = self.processors(self.rows.tokens, logits.clone())
        self.anchors = sample_from_logits(scores, self.do_sample)  # [b]
        self.done = []
        for r, token in enumerate(self.anchors.tolist()):
            new = self.anchors[r : r + 1]
            self.done.append(self.rows.commit(r, new, [token], scores[r : r + 1], logits[r : r + 1])[1])
            if self.indexes is not None:
                self.indexes[r].extend([token])
        if len(input_ids) == 1 and bool(self.mask.all()):
            self.mask = None  # the target needs none, and makes its own faster
        self.clock = time.perf_counter()
        self.stats.prefill_seconds = self.clock - started

    def _prompts(self, input_ids) -> list[list[int]]:
        """Each row's tokens without its padding, where the mask speaks of the ids given."""
        if self.mask.shape[1] != input_ids.shape[1]:
            return input_ids.tolist()
        return [row[own].tolist() for row, own in zip(input_ids, self.mask, strict=True)]

    def drop_finished_rows(self) -> bool:
        """Finished rows stop costing; False when none is left."""
        staying = [i for i, done in enumerate(self.done) if not done]
        if staying and len(staying) < len(self.active):
            index = torch.tensor(staying, device=self.device)
            self.cache.batch_select_indices(index)
            self.draft_cache.select(index.to(self.drafter.device))
            self.backlog.select(index)
            self.mask, self.anchors = self.mask[index], self.anchors[index]  # several rows have a mask
            self.filled, self.lead = [self.filled[i] for i in staying], [self.lead[i] for i in staying]
            if self.indexes is not None:
                self.indexes = [self.indexes[i] for i in staying]
            self.lengths.select(staying)
            self._compact()
        self.active = [self.active[i] for i in staying]
        return bool(self.active)

    def round(self) -> None:
        """Draft, verify, accept, commit, roll."""
        self.processors.active = self.active
        tokens = [self.rows.tokens[row] for row in self.active]
        places = [filled + lead for filled, lead in zip(self.filled, self.lead, strict=True)]  # of each anchor
        most = self._most_drafts(places)
        found = [(0, [])] * len(tokens)
        if self.indexes is not None and most:
            found = [index.continuation(most) for index in self.indexes]
        plan = self.lengths.choose(found, most)
        draft, drafting = self._draft(plan, tokens)
        logits, states = self._verify(draft.token_ids, places)
        scores = _process_block(self.processors, tokens, draft.token_ids, logits)
        accept = accept_sampled if self.do_sample else accept_greedy
        num_accepted, chosen = accept(draft, scores)
        shown = self._commit(draft, num_accepted, chosen, scores, logits)
        self._roll(draft.token_ids.shape[1] + 1, [len(new) for new in shown[-1]], states)
        now = time.perf_counter()
        seconds = None if drafting is None else (drafting, now - self.clock - drafting)
        self.clock = now
        self.lengths.observe(plan, found, *shown, seconds)

    def _most_drafts(self, places: list[int]) -> int:
        """Drafts that the longest-running row has room for."""
        if self.processors.stateful:
            return 0
        room = max(self.rows.room(row) for row in self.active)
        if self.most_positions:
            room = min(room, self.most_positions - max(places))
        return max(0, min(self.limit, room - 1))

    def _draft(self, plan: Plan, tokens: list[torch.Tensor]) -> tuple[DraftOutput, float | None]:
        """The round's proposals, on the target's device, and the seconds they took where they were measured."""
        if self.adaptive and self.backlog.length > (MOST_BACKLOG if not plan.drafts else 2 * self.limit):
            # What piled up is taken in apart, so that it is not mistaken for the cost of a draft.
            started = time.perf_counter()
            self._call_draft(Plan(), tokens)
            seconds = time.perf_counter() - started
            self.stats.draft_seconds += seconds
            self.clock += seconds
        if self.adaptive and not plan.drafts:
            nothing = self.anchors.new_zeros(len(tokens), 0)
            return DraftOutput(nothing, None), 0.0
        started = time.perf_counter()
        draft = self._call_draft(plan, tokens)
        n = draft.token_ids.shape[1]
        if n > plan.drafts:
            raise ValueError(f"draft returned {n} tokens, expected at most {plan.drafts} (max_drafts).")
        measured = self.device.type != "cuda" or self.knobs.synchronize_timers or self._measuring()
        if measured and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds = time.perf_counter() - started
        self.stats.draft_seconds += seconds
        return draft.to(self.device), seconds if measured else None

    def _measuring(self) -> bool:
        """Whether to wait for an asynchronous device between draft and verification: at first, then seldom.

        Rounds as a whole need no waiting: each ends with reading on the host what was accepted.
        """
        return self.stats.num_rounds < 8 or self.stats.num_rounds % 16 == 0

    def _call_draft(self, plan: Plan, tokens: list[torch.Tensor]) -> DraftOutput:
        context, valid = self.backlog.take()
        lookup = plan.lookup if any(part is not None for part in plan.lookup) else None
        self.draft_cache.stage(None if valid is None else valid.to(self.drafter.device), lookup, plan.use_head)
        return self.drafter.draft(
            self.target,
            self.anchors[:, None],
            context,
            self.draft_cache,
            input_ids=tokens,
            max_drafts=plan.drafts,
            logits_processor=self.processors if self.processors else None,
            do_sample=self.do_sample,
        )

    def _verify(self, drafts: torch.Tensor, places: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """One forward over [anchor, d1..dn]: logits `[b, n + 1, V]` and tapped states `[b, n + 1, T * H]`."""
        started = time.perf_counter()
        block = torch.cat([self.anchors[:, None], drafts], dim=1)
        new = block.shape[1]
        positions = torch.tensor(places, device=self.device)[:, None] + torch.arange(new, device=self.device)
        if self.mask is not None:
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(block), new)], dim=1)
        self.taps.clear()  # forwards inside `draft` or a processor are none of ours
        outputs = self.target(
            input_ids=block,
            attention_mask=None if self.mask is None else self.mask.long(),
            position_ids=positions,
            use_cache=True,
            return_dict=True,
            **{self.key: self.cache},
            **self.extras.forward_kwargs,
        )
        logits = outputs.logits.to(self.device)
        if self.processors or self.do_sample or self.rows.keep_logits or self.rows.keep_scores:
            logits = logits.float()  # else only the largest is looked for, which it is in any precision
        states = self.taps.take()
        self.outputs = outputs if self.extras.forward_kwargs else None
        if self.knobs.synchronize_timers and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.stats.verify_seconds += time.perf_counter() - started
        self.stats.num_rounds += 1
        return logits, states

    def _commit(self, draft: DraftOutput, num_accepted, chosen, scores, logits) -> tuple[list, ...]:
        """Append what each row keeps; of each row: drafts, those kept, whether they were looked up, new tokens."""
        n = draft.token_ids.shape[1]
        self.stats.num_plain_steps += n == 0
        drafted = [n] * len(self.active) if draft.lengths is None else draft.lengths.tolist()
        looked_up = [False] * len(self.active) if draft.looked_up is None else draft.looked_up.tolist()
        kept, texts, self.done = [], [], []
        listed = torch.cat([num_accepted[:, None], chosen], dim=1).tolist()  # one wait for the device
        for i, (row, (accepted, *tokens)) in enumerate(zip(self.active, listed, strict=True)):
            tokens = tokens[: accepted + 1]
            count, finished = self.rows.commit(row, chosen[i, : accepted + 1], tokens, scores[i], logits[i])
            kept.append(min(accepted, count))
            self.stats.record(row, drafted[i], kept[-1], count, looked_up[i])
            texts.append(tokens[:count])
            if self.indexes is not None:
                self.indexes[i].extend(texts[-1])
            self.done.append(finished)
        if self.outputs is not None:
            self.extras.add(self.outputs, len(texts[0]))
            self.outputs = None
        return drafted, kept, looked_up, texts

    def _roll(self, new: int, kept: list[int], states: torch.Tensor) -> None:
        """Caches keep the anchor and all kept tokens but the last, which is the next anchor."""
        longest = max(kept)
        self.mask = settle(self.cache, self.mask, new, kept)
        self.filled = [filled + count for filled, count in zip(self.filled, kept, strict=True)]
        self._compact()
        valid = None
        if min(kept) < longest:
            valid = torch.arange(longest, device=self.device) < torch.tensor(kept, device=self.device)[:, None]
        self.backlog.add(states[:, :longest], valid)
        self.anchors = torch.stack([self.rows.tokens[row][-1] for row in self.active])

    def _compact(self) -> None:
        """Only in a batch: the cache of a single row goes back to the caller, column for column."""
        if len(self.rows.tokens) > 1:
            self.mask = compact(self.cache, self.mask, max(self.filled))


def _process_block(processors: RowProcessors, tokens, drafts, logits) -> torch.Tensor:
    """Processed target logits `[b, n + 1, V]`; position i is judged after the row's tokens and its first i drafts."""
    if not processors:
        return logits
    if processors.prefix_free:
        return processors(tokens, logits.flatten(0, 1).clone()).view_as(logits)
    steps = []
    for i in range(logits.shape[1]):
        prefixes = [torch.cat([row, drafts[j, :i]]) for j, row in enumerate(tokens)]
        steps.append(processors(prefixes, logits[:, i].clone()))
    return torch.stack(steps, dim=1)


# The way in -----------------------------------------------------------------------------------------------------

_MARK = "_domino_dispatch"


def _is_drafter(model) -> bool:
    return getattr(model, "is_domino_drafter", False) is True


def _unwrap(model) -> None:
    """Give the drafter what was set on a wrapper around it, such as PEFT's, which only hands reading on."""
    drafter = getattr(model.speculative_decode, "__self__", model)
    if drafter is not model:
        for name in {"generation_config", "last_speculation"} & set(vars(model)):
            setattr(drafter, name, vars(model).pop(name))


def _is_ours(method) -> bool:
    """Whether a wrapper is this code's: it carries itself as a mark, which a wrapper around it copies unchanged."""
    return getattr(method, _MARK, None) is method


def install_dispatch() -> None:
    """Let `generate(assistant_model=drafter)` reach the drafter's own loop. Calling it again changes nothing.

    Two methods of the library's `GenerationMixin` are wrapped: the assisted loop, and the check that refuses several
    return sequences or unequal vocabulary sizes before it. Both pass on whatever is not a Domino drafter. The wrappers
    call methods of the drafter, so any copy of this code in the process serves all drafters.
    """
    if not _is_ours(GenerationMixin._assisted_decoding):
        plain_loop = GenerationMixin._assisted_decoding

        @functools.wraps(plain_loop)
        def _assisted_decoding(self, input_ids, *args, assistant_model=None, **kwargs):
            if _is_drafter(assistant_model):
                _unwrap(assistant_model)
                return assistant_model.speculative_decode(self, input_ids, *args, **kwargs)
            return plain_loop(self, input_ids, *args, assistant_model=assistant_model, **kwargs)

        setattr(_assisted_decoding, _MARK, _assisted_decoding)
        GenerationMixin._assisted_decoding = _assisted_decoding
    if not _is_ours(GenerationMixin._validate_generation_mode):
        plain_check = GenerationMixin._validate_generation_mode

        @functools.wraps(plain_check)
        def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
            if not _is_drafter(generation_mode_kwargs.get("assistant_model")):
                return plain_check(self, generation_mode, generation_config, generation_mode_kwargs)
            if generation_mode != GenerationMode.ASSISTED_GENERATION:
                # Beams and the like run without drafts, as the library warns: its own checks hold.
                others = {key: value for key, value in generation_mode_kwargs.items() if key != "assistant_model"}
                return plain_check(self, generation_mode, generation_config, others)
            if getattr(self, "_is_stateful", False):
                raise ValueError(
                    f"{type(self).__name__} keeps a recurrent state that cannot forget rejected drafts; "
                    "generate without assistant_model."
                )
            return None

        setattr(_validate_generation_mode, _MARK, _validate_generation_mode)
        GenerationMixin._validate_generation_mode = _validate_generation_mode


def remove_dispatch() -> None:
    """Off switch: give the library its own methods back; `generate` then refuses a Domino drafter."""
    for name in ("_assisted_decoding", "_validate_generation_mode"):
        method = getattr(GenerationMixin, name)
        while _is_ours(method):
            method = method.__wrapped__
        setattr(GenerationMixin, name, method)
