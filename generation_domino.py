"""Speculative decoding with a Domino drafter: the decode loop, and the way in from `generate`.

The loop works on rows that may differ in length. Each round:

    draft    [anchor] -> d1..dn            (`drafter.draft`, the only source of proposals)
    verify   target([anchor, d1..dn])      (one forward; tapped layers are captured by hooks)
    accept   leading drafts that the target agrees with, plus its own bonus token, the next anchor
    commit   row by row, cut at whatever would have stopped plain decoding
    roll     caches keep committed positions only

Cache layout: every row is right-aligned and padded on the left, as `generate` lays out a batch. After a round in which
rows keep different numbers of tokens, the shorter rows are shifted right and the surplus is cropped, so columns of one
row stay adjacent (which sliding windows count on), and the cache is as wide as the longest committed row.

Takes draft and target as arguments and imports neither modeling nor training code.
"""

from __future__ import annotations

import functools
import time
from contextlib import contextmanager

import torch
from torch import nn
from transformers import DynamicCache, GenerationConfig, GenerationMixin
from transformers.generation import GenerationMode
from transformers.generation import stopping_criteria as stopping
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .speculation_domino import (
    DraftOutput,
    RowProcessors,
    SpeculationStats,
    accept_greedy,
    accept_sampled,
    sample_from_logits,
)

# Inputs that give positions another meaning than the count of tokens.
MULTIMODAL_INPUTS = ("pixel_values", "pixel_values_videos", "image_embeds", "input_features", "input_values")

# Target side ----------------------------------------------------------------------------------------------------


def decoder_layers(target) -> nn.ModuleList:
    """The target's decoder layers, whatever its family calls them."""
    count = target.config.get_text_config(decoder=True).num_hidden_layers
    # The decoder first: a vision tower may have as many layers.
    for module in target.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(
        f"no list of {count} decoder layers in {type(target).__name__}; Domino taps decoder layers, "
        "so the target must be a decoder-only transformer."
    )


def position_limit(target) -> int | None:
    """How many positions the target knows, where its config says so."""
    return getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)


class TappedStates:
    """Outputs of the tapped layers, collected by forward hooks; version-proof, and nothing else is kept."""

    def __init__(self, layer_ids: list[int]):
        self.layer_ids = layer_ids
        self._captured: dict[int, list[torch.Tensor]] = {i: [] for i in layer_ids}

    def hook(self, layer_id: int):
        """Forward hook of one layer."""

        def keep(module, arguments, output):
            self._captured[layer_id].append(output[0] if isinstance(output, tuple) else output)

        return keep

    def clear(self) -> None:
        """Forget what forwards outside the loop left here."""
        for captured in self._captured.values():
            captured.clear()

    def take(self) -> torch.Tensor:
        """Everything since the last call, `[batch, positions, taps * H]`; several forwards are joined."""
        for i, captured in self._captured.items():
            if not captured or captured[0].dim() != 3:
                shape = tuple(captured[0].shape) if captured else "nothing"
                raise ValueError(
                    f"target layer {i} put out {shape}; Domino taps layers that put out [batch, positions, hidden]."
                )
        states = [torch.cat(self._captured[i], dim=1) for i in self.layer_ids]
        self.clear()
        return torch.cat([state.to(states[0].device) for state in states], dim=-1)


@contextmanager
def tapped_states(target, layer_ids: list[int]):
    """Hooks on the tapped layers for as long as the context lasts, removed also on an exception.

    Yields:
        TappedStates: its `take()` gives what the forwards since the last call produced.
    """
    layers = decoder_layers(target)
    if max(layer_ids) >= len(layers) or min(layer_ids) < 0 or len(set(layer_ids)) != len(layer_ids):
        raise ValueError(f"target_layer_ids is {layer_ids}; expected distinct layers from 0 to {len(layers) - 1}.")
    taps = TappedStates(layer_ids)
    handles = [layers[i].register_forward_hook(taps.hook(i)) for i in layer_ids]
    try:
        yield taps
    finally:
        for handle in handles:
            handle.remove()


def cache_key(target, model_kwargs: dict) -> str:
    """Name under which this version of the library passes the cache to `forward`."""
    return "cache" if "cache" in model_kwargs else "past_key_values"


def roll_cache(cache: DynamicCache, drop: int, shifts: torch.Tensor | None) -> None:
    """Forget the last `drop` columns, after moving row r right by `shifts[r]` of them (None: no row moves)."""
    if shifts is not None:
        for layer in cache.layers:
            columns = torch.arange(layer.keys.shape[2], device=layer.keys.device)
            # Column j of a row takes what stood `total - shift` ... to its left; what wraps around is masked padding.
            source = (columns[None] - shifts.to(columns.device)[:, None]) % columns.shape[0]  # [b, L]
            index = source[:, None, :, None].expand(-1, layer.keys.shape[1], -1, layer.keys.shape[3])
            layer.keys = layer.keys.gather(2, index)
            index = source[:, None, :, None].expand(-1, layer.values.shape[1], -1, layer.values.shape[3])
            layer.values = layer.values.gather(2, index)
    if drop or any(cache.is_sliding):
        cache.crop(-drop)


# The loop -------------------------------------------------------------------------------------------------------


class _Rows:
    """Committed sequences of a call, what stops them, and the outputs asked for."""

    def __init__(self, input_ids, criteria, generation_config, streamer):
        self.tokens = list(input_ids)  # one [length] tensor a row, left padding included
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

    def commit(self, row: int, new: torch.Tensor, scores: torch.Tensor, logits: torch.Tensor) -> tuple[int, bool]:
        """Append tokens `[k]` up to and including the first that stops the row.

        Returns how many were kept and whether the row is done. Stops are looked for after every token, because that is
        where plain decoding looks: a criterion may read only the last token, or count its calls.
        """
        listed = new.tolist()
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
        self.tokens[row] = torch.cat([self.tokens[row], new[:kept]])
        if self.streamer is not None:
            for token in new[:kept].cpu():
                self.streamer.put(token[None])
        return kept, done

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


def _check_call(target, input_ids, generation_config, streamer, synced_gpus, cache, passed_length, embeds) -> None:
    """One sentence for what this loop cannot do, before anything runs."""
    batch_size, length = input_ids.shape
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
    knobs = drafter.generation_config
    knobs.check()
    key = cache_key(target, model_kwargs)
    cache = model_kwargs.get(key)
    passed_length = cache.get_seq_length() if cache is not None else 0
    embeds = model_kwargs.get("inputs_embeds")
    for name in MULTIMODAL_INPUTS:
        if model_kwargs.get(name) is not None:
            raise ValueError(f"the drafter reads text only, got {name}; generate without assistant_model.")
    _check_call(target, input_ids, generation_config, streamer, synced_gpus, cache, passed_length, embeds)
    batch_size, device = input_ids.shape[0], input_ids.device
    processors = RowProcessors(logits_processor if logits_processor is not None else [], batch_size)
    if processors.stateful and batch_size > 1:
        raise ValueError("guidance and SynthID watermarks remember their calls; generate one sequence at a time.")
    rows = _Rows(input_ids, stopping_criteria or [], generation_config, streamer)
    stats = SpeculationStats([[] for _ in range(batch_size)], accepted_drafts=[[] for _ in range(batch_size)])
    drafter.last_speculation = stats
    extras = _Extras(generation_config)
    most_positions = position_limit(target)
    limit = drafter.config.num_drafts if knobs.num_assistant_tokens is None else knobs.num_assistant_tokens

    with tapped_states(target, drafter.config.target_layer_ids) as taps:
        # Prefill: as plain decoding does it.
        outputs = target._prefill(input_ids, generation_config, model_kwargs)
        cache = outputs[key]
        context = taps.take()  # [b, prompt positions without states of a passed cache, T * H]
        mask = model_kwargs.get("attention_mask")
        if mask is None:
            mask = input_ids.new_ones(batch_size, cache.get_seq_length())
        mask = mask.to(device).bool()  # [b, columns of the target's cache]
        # The caller may count positions in another way than by tokens.
        given = model_kwargs.get("position_ids")
        lead = given[:, -1] + 1 - mask.sum(-1) if given is not None and given.dim() == 2 else 0 * mask.sum(-1)
        valid = mask[:, -context.shape[1] :]
        draft_cache = drafter.new_cache(batch_size, (mask.sum(-1) - valid.sum(-1)).to(drafter.device))
        if hasattr(cache, "activate_past_recording"):
            cache.activate_past_recording()
        logits = outputs.logits[:, -1].to(device=device, dtype=torch.float32, copy=True)
        extras.add(outputs, 1, prefill=True)
        scores = processors(rows.tokens, logits.clone())
        anchors = sample_from_logits(scores, generation_config.do_sample)  # [b]
        done = [rows.commit(r, anchors[r : r + 1], scores[r : r + 1], logits[r : r + 1])[1] for r in range(batch_size)]
        active = list(range(batch_size))
        del outputs

        while True:
            staying = [i for i, row in enumerate(active) if not done[i]]
            if len(staying) < len(active):
                # Finished rows stop costing.
                index = torch.tensor(staying, device=device, dtype=torch.long)
                active = [active[i] for i in staying]
                if not active:
                    break
                cache.batch_select_indices(index)
                draft_cache.select(index.to(drafter.device))
                mask, anchors, context, valid = mask[index], anchors[index], context[index], valid[index]
                lead = lead[index]
            processors.active = active
            tokens = [rows.tokens[row] for row in active]
            room = max(rows.room(row) for row in active)
            place = mask.sum(-1) + lead  # position of each row's anchor, [b]
            if most_positions:
                room = min(room, most_positions - int(place.max()))
            n_most = 0 if processors.stateful else max(0, min(limit, room - 1))

            clock = _now(device, knobs)
            draft_cache.stage(valid.to(drafter.device))
            draft = drafter.draft(
                target,
                anchors[:, None],
                context,
                draft_cache,
                input_ids=tokens,
                max_drafts=n_most,
                logits_processor=processors if processors else None,
                do_sample=generation_config.do_sample,
            )
            drafts = draft.token_ids.to(device)
            n = drafts.shape[1]
            if n > n_most:
                raise ValueError(f"draft returned {n} tokens, expected at most {n_most} (max_drafts).")
            drafted_at = _now(device, knobs)
            stats.draft_seconds += drafted_at - clock

            # Verify: one forward over [anchor, d1..dn].
            block = torch.cat([anchors[:, None], drafts], dim=1)
            positions = place[:, None] + torch.arange(n + 1, device=device)
            mask = torch.cat([mask, mask.new_ones(len(active), n + 1)], dim=1)
            taps.clear()
            outputs = target(
                input_ids=block,
                attention_mask=mask.long(),
                position_ids=positions,
                use_cache=True,
                return_dict=True,
                **{key: cache},
                **extras.forward_kwargs,
            )
            logits = outputs.logits.to(device=device, dtype=torch.float32)  # [b, n + 1, V]
            states = taps.take()
            stats.verify_seconds += _now(device, knobs) - drafted_at
            stats.num_rounds += 1

            # Accept.
            scores = _process_block(processors, tokens, drafts, logits)
            if generation_config.do_sample:
                laws = DraftOutput(drafts, draft.logits.to(device))
                num_accepted, chosen = accept_sampled(laws, scores)
            else:
                num_accepted, chosen = accept_greedy(drafts, scores)

            # Commit.
            kept, done = [], []
            for i, (row, accepted) in enumerate(zip(active, num_accepted.tolist(), strict=True)):
                new = chosen[i, : accepted + 1]
                count, finished = rows.commit(row, new, scores[i], logits[i])
                stats.record(row, n, min(accepted, count), count)
                kept.append(count)
                done.append(finished)
            extras.add(outputs, kept[0])
            del outputs

            # Roll: keep the anchor and all kept tokens but the last, which is the next anchor.
            longest = max(kept)
            counts = torch.tensor(kept, device=device)
            shifts = None if min(kept) == longest else longest - counts
            roll_cache(cache, n + 1 - longest, shifts)
            context = states[:, :longest]  # [b, longest, T * H], a row's own from the left
            valid = torch.arange(longest, device=device)[None] < counts[:, None]
            anchors = torch.stack([rows.tokens[row][-1] for row in active])
            mask = _rolled_mask(mask, n + 1 - longest, shifts)
            mask = _trim_left(cache, mask)

    for layer in cache.layers:
        if hasattr(layer, "record_past"):
            layer.record_past = False  # a caller's cache goes on as it came
    if streamer is not None:
        streamer.end()
    stats.total_seconds = time.perf_counter() - started
    sequences = rows.sequences(generation_config._pad_token_tensor)
    if not generation_config.return_dict_in_generate:
        return sequences
    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=rows.per_step(rows.scores) if rows.keep_scores else None,
        logits=rows.per_step(rows.logits) if rows.keep_logits else None,
        attentions=extras.attentions,
        hidden_states=extras.hidden_states,
        **{key: cache if batch_size == 1 else None},
    )


def _now(device: torch.device, knobs) -> float:
    if knobs.synchronize_timers and device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


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


def _rolled_mask(mask: torch.Tensor, drop: int, shifts: torch.Tensor | None) -> torch.Tensor:
    """The mask `[b, columns]` after `roll_cache`: columns that a row's shift opened on its left are padding."""
    width = mask.shape[1]
    columns = torch.arange(width, device=mask.device)
    if shifts is not None:
        source = columns[None] - shifts[:, None]
        mask = mask.gather(1, source.clamp(min=0)) & (source >= 0)
    return mask[:, : width - drop]


def _trim_left(cache: DynamicCache, mask: torch.Tensor) -> torch.Tensor:
    """Drop leading columns that are padding in every row, which appear when the longest row has finished."""
    if mask.shape[0] == 0 or bool(mask[:, 0].any()) or any(cache.is_sliding):
        return mask
    first = int(mask.any(0).long().argmax())
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, first:], layer.values[:, :, first:]
    return mask[:, first:]


class _Extras:
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
