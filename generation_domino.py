"""Speculative decoding with a Domino drafter: the decode loop, and the way in from `generate`.

The text is made by the library's own plain decoding, `GenerationMixin._sample`: its processors, its choice of tokens,
its stopping criteria, its records. It runs on a stand-in for the target (`SpeculativeTarget`) that answers "the logits
behind this text" from one forward over several tokens, as long as the text goes on as that forward assumed. A round:

    propose  [anchor] -> d1..dn       from the drafter, from an earlier occurrence in the text, or none
    verify   target([anchor, d1..dn]) one forward, with the inputs that the library itself prepares
    walk     plain decoding takes position after position while each new token is the draft of every row
    roll     the cache forgets the positions that plain decoding did not take

So a proposal can change how many forwards a text takes, and never the text. Rows of a batch stay in step, as in plain
decoding: the round ends at the first token that is not the draft of its row. What other rows had right beyond it is
proposed again in the next round.

Takes draft and target as arguments and imports neither modeling nor training code.
"""

from __future__ import annotations

import copy
import functools
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F
from transformers import GenerationConfig, GenerationMixin, StoppingCriteriaList
from transformers.generation import GenerationMode

from .length_domino import NgramIndex, Proposals, length_policy
from .processors_domino import DraftProcessors, all_from_library
from .speculation_domino import DraftOutput, NoiseAhead, RoundTimer, SpeculationStats, coupled
from .target_domino import (
    LengthBorders,
    TappedStates,
    cache_of,
    can_roll_back,
    embedding_size,
    end_rollback,
    position_limit,
    prepare_rollback,
    tapped_states,
    verification_inputs,
)

# Columns of tapped states that rounds without the drafter may pile up before the drafter takes them in.
MAX_BACKLOG = 128
# Lookup continuations may be longer than a block.
MAX_LOOKUP = 32


def _check_call(target, input_ids, generation_config, synced_gpus, model_kwargs) -> None:
    """One sentence for what cannot run with a drafter, before anything runs."""
    if target.config.is_encoder_decoder:
        raise ValueError(f"{type(target).__name__} is an encoder-decoder; Domino drafts for decoder-only models.")
    if input_ids.shape[1] == 0 and model_kwargs.get("inputs_embeds") is None:
        raise ValueError("the prompt is empty; pass at least one token, for example the tokenizer's bos_token.")
    if not generation_config.use_cache:
        raise ValueError("speculative decoding needs the target's cache; leave use_cache at True.")
    if synced_gpus:
        raise ValueError("speculative decoding does not keep ZeRO-3 or FSDP peers in step; pass synced_gpus=False.")
    if getattr(generation_config, "assistant_ensemble_weight", None) is not None:
        raise ValueError("assistant_ensemble_weight changes the text; Domino keeps the target's own, so leave it out.")


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
        what plain `generate` returns; statistics are in `drafter.last_speculation`.
    Raises:
        ValueError: a call that cannot run with a drafter.
    """
    started = time.perf_counter()
    for unused in ("inputs_tensor", "tokenizer", "assistant_tokenizer", "assistant_model"):
        model_kwargs.pop(unused, None)
    drafter.generation_config.check()
    _check_call(target, input_ids, generation_config, synced_gpus, model_kwargs)
    processors = logits_processor if logits_processor is not None else []
    criteria = WatchedCriteria(stopping_criteria or [])
    with tapped_states(target, drafter.config.target_layer_ids) as taps:
        call = SpeculativeTarget(target, drafter, taps, input_ids, processors, criteria, generation_config)
        drafter.last_speculation = call.stats
        try:
            output = type(target)._sample(
                call,
                input_ids,
                logits_processor=processors,
                stopping_criteria=criteria,
                generation_config=generation_config,
                synced_gpus=False,
                streamer=streamer,
                **model_kwargs,
            )
            call.end_round(output if torch.is_tensor(output) else output.sequences)
        finally:
            call.close()
    call.stats.total_seconds = time.perf_counter() - started
    return output


class WatchedCriteria(StoppingCriteriaList):
    """Stopping criteria that remember which rows are done, bool `[batch]`; None before the first token."""

    done: torch.Tensor | None = None

    def __call__(self, input_ids, scores, **kwargs):
        """The criteria's own answer."""
        now = super().__call__(input_ids, scores, **kwargs)
        self.done = now if self.done is None else self.done | now
        return now


@dataclass
class Block:
    """One verification forward, and how much of it plain decoding has taken.

    Args:
        ids (int `[batch, n + 1]`): anchor and drafts.
        length (int): committed ids when it ran, the anchor included.
        outputs: of the forward; states (float `[batch, n + 1, T * H]`): of the tapped layers.
        proposals: where the drafts came from.

    Attributes:
        alive (list[list[bool]]): of each position taken, the rows that were still being written.
    """

    ids: torch.LongTensor
    length: int
    outputs: Any
    states: torch.Tensor
    proposals: Proposals
    alive: list[list[bool]] = field(default_factory=list)

    @property
    def drafts(self) -> int:
        """Drafts of each row, n."""
        return self.ids.shape[1] - 1

    @property
    def served(self) -> int:
        """Positions taken."""
        return len(self.alive)

    def logits(self, start: int, end: int | None = None) -> torch.Tensor:
        """Of the block's positions from `start` to `end`, `[batch, positions, V]`."""
        return self.outputs.logits[:, -self.ids.shape[1] :][:, start:end]

    def serve(self, alive: list[bool]) -> Any:
        """The outputs of the next position, as a plain step gives them: logits `[batch, 1, V]`."""
        outputs, position = self.outputs, self.served
        self.alive.append(alive)
        if self.drafts:
            outputs = copy.copy(outputs)
            outputs["logits"] = self.logits(position, position + 1)
        return outputs


class SpeculativeTarget:
    """What plain decoding runs on: the target, but several positions are computed at a time.

    Whatever is not defined here is the target's own.

    Args:
        taps: hooks on the target's tapped layers.
        input_ids (int `[batch, length]`): the prompts.
        processors, criteria, generation_config: of the call.
    """

    def __init__(self, target, drafter, taps: TappedStates, input_ids, processors, criteria, generation_config):
        batch_size, device = len(input_ids), input_ids.device
        knobs = drafter.generation_config
        self.target, self.drafter, self.taps, self.criteria = target, drafter, taps, criteria
        self.stats = SpeculationStats([[] for _ in range(batch_size)], accepted_drafts=[[] for _ in range(batch_size)])
        self.timer = RoundTimer(self.stats, device, knobs.synchronize_timers)
        self.policy = length_policy(knobs, drafter.config.num_drafts)
        self.draft_processors = DraftProcessors(processors)
        self.do_sample, self.noise = generation_config.do_sample, None
        self.max_length = criteria.max_length or generation_config.max_length
        self.borders, self.max_positions = LengthBorders(target), position_limit(target)
        self.num_ids = embedding_size(target)
        pad = generation_config._pad_token_tensor
        self.pad_token_id = 0 if pad is None else int(pad)
        records = generation_config.return_dict_in_generate
        # Rows that are done are fed padding, as in plain decoding, if anybody may look at what comes of them.
        self.follow_done_rows = records or not all_from_library(processors, criteria)
        # Hidden states and attentions of several tokens have other shapes: such calls go by plain steps.
        self.plain_steps = bool(
            records and (generation_config.output_hidden_states or generation_config.output_attentions)
        )
        self.cache: Any = None
        self.draft_cache: Any = None
        self.block: Block | None = None
        self.last_outputs: Any = None
        self.hidden_columns = 0  # cached columns before the first of `input_ids`: embeddings, an earlier turn
        self.backlog: list[torch.Tensor] = []  # tapped states [batch, new, T * H] that the drafter has not taken in
        self.context_mask: torch.Tensor | None = None  # bool [batch, new] of the first of them; None: all are real
        self.indexes: list[NgramIndex] = []
        self.known: list[list[int]] = [[] for _ in range(batch_size)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    # What plain decoding calls ----------------------------------------------------------------------------------

    def _prefill(self, input_ids, generation_config, model_kwargs, *args, **kwargs):
        """The target's own prefill; the prompt becomes the drafter's first context."""
        self.taps.clear()
        with self.timer.section("prefill"):
            outputs = self.target._prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)
        self.after_prefill(input_ids, outputs, model_kwargs.get("attention_mask"))
        return outputs

    def prepare_inputs_for_generation(self, input_ids: torch.LongTensor, *args, **kwargs) -> dict[str, Any]:
        """The text so far and what a plain step would be prepared from; the round prepares it."""
        return {"input_ids": input_ids, "step": kwargs}

    def get_compiled_call(self, *args, **kwargs):
        """Compiled decoding is made for one token at a time; several run eagerly."""
        return self.__call__

    def __call__(self, input_ids: torch.LongTensor, step: dict[str, Any], **kwargs) -> Any:
        """Outputs behind the text so far: from the block at hand if the text follows it, else from a new round."""
        alive = self.alive_rows()
        if not self.follows_block(input_ids, alive):
            self.end_round(input_ids)
            self.timer.start_round()
            self.block = self.verify(input_ids, self.propose(input_ids, alive, step), step)
        self.last_outputs = self.block.serve(alive)
        return self.last_outputs

    # The round --------------------------------------------------------------------------------------------------

    def alive_rows(self) -> list[bool]:
        """Which rows are still being written."""
        done = self.criteria.done
        return [True] * len(self.known) if done is None or len(self.known) == 1 else (~done).tolist()

    def follows_block(self, input_ids: torch.LongTensor, alive: list[bool]) -> bool:
        """Whether the text went on with the block's next draft."""
        block = self.block
        if block is None or block.served > block.drafts:
            return False
        same = (input_ids[:, -1] == block.ids[:, block.served]).tolist()
        return all(s or not (a or self.follow_done_rows) for s, a in zip(same, alive, strict=True))

    def propose(self, input_ids: torch.LongTensor, alive: list[bool], step: dict[str, Any]) -> Proposals:
        """Ids behind each row, from whatever source is expected to pay."""
        room = self.room(input_ids.shape[1], step)
        lookups = [index.continuation(min(room, MAX_LOOKUP)) for index in self.indexes]
        proposals = Proposals(self.known, lookups, alive, room, self.pad_token_id)
        max_drafts = self.policy.drafts_to_ask_for(proposals)
        if max_drafts or sum(states.shape[1] for states in self.backlog) > MAX_BACKLOG:
            with self.timer.section("draft"):
                proposals.drafted = self.draft(input_ids, max_drafts)
        self.policy.choose(proposals)
        return proposals

    def room(self, length: int, step: dict[str, Any]) -> int:
        """How many drafts behind `length` ids one forward can judge as plain steps would."""
        if self.plain_steps:
            return 0
        room = self.max_length - length - 1
        columns = self.hidden_columns + length
        if self.max_positions:
            room = min(room, self.max_positions - columns)
        if self.borders:
            room = self.borders.room(columns, room)
            if (positions := step.get("position_ids")) is not None:
                room = self.borders.room(int(positions[..., -1].max()) + 1, room)
        return max(0, room)

    def draft(self, input_ids: torch.LongTensor, max_drafts: int) -> DraftOutput:
        """The drafter's proposals; it takes in all states since it last ran."""
        context, mask = torch.cat(self.backlog, dim=1), self.context_mask
        if mask is not None:
            mask = F.pad(mask, (0, context.shape[1] - mask.shape[1]), value=True)
        self.backlog, self.context_mask = [context[:, :0].clone()], None  # no view: it would keep all of it
        drafted = self.drafter.draft(
            self.target,
            input_ids[:, -1:],
            context,
            self.draft_cache,
            input_ids=input_ids,
            max_drafts=max_drafts,
            context_mask=mask,
            logits_processor=self.draft_processors or None,
            noise=self.noise,
        )
        drafted.check(len(input_ids), max_drafts, self.num_ids)
        return drafted.to(input_ids.device)

    def verify(self, input_ids: torch.LongTensor, proposals: Proposals, step: dict[str, Any]) -> Block:
        """One forward over [anchor, d1..dn]."""
        drafts = proposals.token_ids(input_ids.device)
        self.taps.clear()  # forwards inside `draft` or a processor are none of ours
        with self.timer.section("verify"):
            inputs = verification_inputs(self.target, input_ids, drafts, self.last_outputs, step)
            outputs = self.target(**inputs, return_dict=True)
        self.take_cache(outputs)
        ids = torch.cat([input_ids[:, -1:], drafts], dim=1)
        if outputs.logits.shape[1] < ids.shape[1]:
            raise ValueError(
                f"{type(self.target).__name__} put out logits of {outputs.logits.shape[1]} tokens, expected "
                f"{ids.shape[1]}: it does not read several tokens at a time; generate without assistant_model."
            )
        self.stats.num_rounds += 1
        self.stats.num_plain_steps += drafts.shape[1] == 0
        return Block(ids, input_ids.shape[1], outputs, self.taps.take()[:, -ids.shape[1] :], proposals)

    def end_round(self, input_ids: torch.LongTensor) -> None:
        """Roll the cache back to what plain decoding took of the block, and learn from it.

        Args:
            input_ids (int `[batch, length]`): the text with the block's tokens.
        """
        block, self.block = self.block, None
        if block is None:  # the prefill's token belongs to no round
            for index, token in zip(self.indexes, input_ids[:, -1].tolist(), strict=False):
                index.extend([token])
            return
        self.cache.crop(block.served - block.ids.shape[1])
        self.backlog.append(block.states[:, : block.served])
        new = input_ids[:, block.length : block.length + block.served].tolist()
        drafts = block.ids[:, 1:].tolist()
        proposals = block.proposals
        for row, alive in enumerate(zip(*block.alive, strict=True)):
            new[row] = new[row][: sum(alive)]
            if not new[row]:
                continue
            pairs = list(zip(drafts[row], new[row], strict=False))
            accepted = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), len(pairs))
            looked_up = bool(proposals.looked_up and proposals.looked_up[row])
            self.stats.record(
                row, block.drafts, accepted, len(new[row]), min(len(self.known[row]), block.drafts), looked_up
            )
            if self.indexes:
                self.indexes[row].extend(new[row])
        self.policy.observe(proposals, new, self.timer.drafting, self.timer.rest_of_round())
        self.known = self.known_beyond(block, drafts, new)

    def known_beyond(self, block: Block, drafts: list[list[int]], new: list[list[int]]) -> list[list[int]]:
        """What rows would go on with whose drafts were right up to the round's end, and beyond it.

        Only proposals for the next round: the walk judges them as any other.
        """
        known: list[list[int]] = [[] for _ in new]
        if len(new) == 1 or block.served > block.drafts:
            return known
        processors = self.draft_processors.without_prefixes()
        guesses = []
        for i in range(block.served, block.drafts + 1):
            logits = processors(None, block.logits(i, i + 1)[:, 0].float())
            noise = None if self.noise is None else self.noise[i - block.served]
            guesses.append(coupled(logits, noise).argmax(-1))
        guesses = torch.stack(guesses, dim=1).tolist()  # [batch, n + 1 - served]
        for row, ahead in enumerate(guesses):
            if not block.alive[-1][row] or drafts[row][: block.served] != new[row]:
                continue
            matches = zip(ahead, drafts[row][block.served :], strict=False)
            right = next((i for i, (ours, theirs) in enumerate(matches) if ours != theirs), len(ahead) - 1)
            known[row] = ahead[: right + 1]
        return known

    # Beginning and end ------------------------------------------------------------------------------------------

    def after_prefill(self, input_ids: torch.LongTensor, outputs: Any, mask: torch.Tensor | None) -> None:
        """Set up what the rounds need: cache, drafter's context, lookup index, noise."""
        if not can_roll_back(self.target, cache_of(outputs)):
            kind = type(cache_of(outputs)).__name__
            raise ValueError(
                f"{type(self.target).__name__} keeps its past in {kind}, which cannot forget rejected drafts "
                "(a recurrent state, a quantised cache or no cache); generate without assistant_model."
            )
        self.take_cache(outputs)
        context = self.taps.take()  # [batch, columns of this forward, T * H]
        batch_size, new = context.shape[:2]
        columns = max(self.cache.get_seq_length(), new)
        self.hidden_columns = columns - input_ids.shape[1]
        if mask is None:
            mask = torch.ones(batch_size, columns, dtype=torch.long, device=input_ids.device)
        mask = F.pad(mask.bool(), (columns - mask.shape[1], 0), value=True)  # columns that the target added itself
        valid = mask[:, -new:].to(self.drafter.device)
        self.context_mask = None if bool(valid.all()) else valid
        first_position = (mask.sum(-1) - mask[:, -new:].sum(-1)).to(self.drafter.device)
        self.draft_cache = self.drafter.new_cache(batch_size, first_position)
        self.backlog = [context]
        self.last_outputs = outputs
        if self.do_sample:
            self.noise = NoiseAhead(input_ids.device, (batch_size, outputs.logits.shape[-1]))
        if self.policy.uses_lookup:
            own = mask if mask.shape == input_ids.shape else torch.ones_like(input_ids, dtype=torch.bool)
            self.indexes = [NgramIndex(row[keep].tolist()) for row, keep in zip(input_ids, own, strict=True)]

    def take_cache(self, outputs: Any) -> None:
        """Work on the cache of these outputs, which the target may have made anew."""
        cache = cache_of(outputs)
        if cache is not self.cache:
            self.close()
            prepare_rollback(cache)
            self.cache = cache

    def close(self) -> None:
        """Give the cache back as plain decoding would leave it; what an exception left of a block is cut off."""
        if self.cache is None:
            return
        if self.block is not None:
            self.cache.crop(self.block.served - self.block.ids.shape[1])
            self.block = None
        end_rollback(self.cache)
        self.cache = None


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
