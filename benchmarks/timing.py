"""What a round costs: forwards of target and drafter by themselves, and what `generate` makes of them.

Speculation can gain at most

    limit = tau * T_target(1) / (T_draft + T_verify)

and `profile` says how much of it arrives. T_target(1) is there the time of a token in plain `generate`, since that is
what a user leaves behind; the bare forward is shorter by `generate`'s own work per token, and against it the ratio
would look better by just that. T_draft and T_verify are forwards by themselves, outside the loop, so what the loop
adds to them (waiting, copies, Python) counts as lost.
"""

from __future__ import annotations

import copy
import shutil
import statistics
import subprocess
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import transformers
from domino_spec.target_domino import cache_of, prepare_rollback, tapped_states
from domino_spec.training.answers import ended
from domino_spec.training.card import processor_name

WHOLE_BLOCKS = {"num_assistant_tokens_schedule": "constant", "rollout": "sequential", "use_head": True}
# Tapped states that a draft takes in while it is timed: about what a round commits.
NEW_STATES = 2
# Times that each forward is taken a prompt; the median counts.
TAKES = 3
# Above and below every logit, also in float16.
SURE = 3e4


def machine() -> dict[str, str]:
    """What a reader needs to judge the numbers."""
    name = processor_name()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        # What decides how fast bfloat16 is.
        flags = cpuinfo.read_text().split()
        name += "".join(f", {'' if flag in flags else 'no '}{flag}" for flag in ("avx512_bf16", "amx_bf16"))
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
    commit = _git("rev-parse", "--short", "HEAD")
    if _git("status", "--porcelain", "--untracked-files=no"):
        commit += " with changes"
    return {
        "hardware": name,
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit or "none",
    }


def _git(*arguments: str) -> str:
    """What git says of this directory; nothing where there is no git or no repository."""
    if shutil.which("git") is None:
        return ""
    place = Path(__file__).parent
    return subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=place).stdout.strip()


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a reading of the clock means something."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def quartiles(values) -> list[float]:
    """Lower quartile, median, upper quartile."""
    values = sorted(values)
    if len(values) == 1:
        return values * 3
    return statistics.quantiles(values, n=4, method="inclusive")


@contextmanager
def timed_forwards(model, wait: bool = False):
    """Yields a list that gets `[start, end]` of every forward of `model`.

    Args:
        wait: let an asynchronous device finish before each reading; otherwise only after the first forward, the
            prefill, and all spans but that one are times of launching.
    """
    spans: list[list[float]] = []

    def before(module, inputs):
        if wait:
            synchronize(model.device)
        spans.append([time.perf_counter(), float("nan")])

    def after(module, inputs, output):
        if wait or len(spans) == 1:
            synchronize(model.device)
        spans[-1][1] = time.perf_counter()

    handles = [model.register_forward_pre_hook(before), model.register_forward_hook(after)]
    try:
        yield spans
    finally:
        for handle in handles:
            handle.remove()


def lasted(spans: list[list[float]]) -> list[float]:
    """Seconds of each span."""
    return [end - start for start, end in spans]


@contextmanager
def drafting(drafter, **knobs):
    """The drafter with these knobs for as long as the context lasts."""
    config = drafter.generation_config
    before = {name: getattr(config, name) for name in knobs}
    for name, value in knobs.items():
        setattr(config, name, value)
    try:
        yield drafter
    finally:
        for name, value in before.items():
            setattr(config, name, value)


@contextmanager
def forced_acceptance(target, pattern: list[int]):
    """Verifications of one `generate` call that accept as many drafts as they are told, whatever the drafts are.

    For targets and drafters without training: both do all of their work, and only then the target's logits of the
    drafted ids are raised (accepted) or, at the first draft too many, lowered (rejected). The text means nothing.

    Args:
        pattern (list[int]): drafts to accept, round by round and then from the start again, in all rows.
    """
    verified = 0

    def force(module, arguments, keywords, output):
        nonlocal verified
        verified += 1
        drafts = keywords["input_ids"][:, 1:, None]  # [b, n, 1]
        n = drafts.shape[1]
        if verified == 1 or n == 0:
            return  # the prefill, or a plain step
        # All of it on the device: nothing is waited for.
        accepted, slots = pattern[(verified - 2) % len(pattern)], torch.arange(n, device=drafts.device)
        logits = output.logits[:, :n]
        told = torch.where(slots < accepted, SURE, -SURE).to(logits.dtype)[..., None]
        judged = (slots <= accepted)[:, None]
        logits.scatter_(2, drafts, torch.where(judged, told, logits.gather(2, drafts)))

    handle = target.register_forward_hook(force, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


# Forwards by themselves ---------------------------------------------------------------------------------------------


@contextmanager
def passes(target, drafter, ids: torch.Tensor, lengths: list[int]):
    """Forwards as plain decoding and a round make them, behind a context of `ids`.

    Args:
        ids (int `[batch, context]`): text, at least `NEW_STATES` + 1 tokens.
        lengths (list[int]): numbers of drafts to verify and to draft.
    Yields:
        dict: by (kind, tokens), a function that runs the forward, and one that undoes it. Kinds: "target" (one token
        behind the library's own cache), "verify" (drafts + 1 tokens behind the loop's), "draft", and "base" (a draft
        with the head off).
    """
    batch_size = len(ids)
    with tapped_states(target, drafter.config.target_layer_ids) as taps:
        outputs = target(input_ids=ids[:, :-1], use_cache=True, return_dict=True)
        states = taps.take()
    plain_cache = cache_of(outputs)
    key = next(name for name, value in outputs.items() if value is plain_cache)
    round_cache = copy.deepcopy(plain_cache)
    context = ids.shape[1] - 1
    draft_cache = drafter.new_cache(batch_size)
    new = states[:, -NEW_STATES:]
    drafter.draft(target, ids[:, -1:], states[:, :-NEW_STATES], draft_cache, input_ids=ids, max_drafts=0)

    def forward(cache, n: int):
        def run() -> None:
            target(
                input_ids=ids[:, -1:].expand(-1, n).contiguous(),
                attention_mask=ids.new_ones(batch_size, context + n),
                position_ids=torch.arange(context, context + n, device=ids.device).expand(batch_size, -1),
                use_cache=True,
                return_dict=True,
                **{key: cache},
            )

        return run, lambda: cache.crop(-n)

    def draft(n: int, use_head: bool):
        def run() -> None:
            with drafting(drafter, **WHOLE_BLOCKS | {"use_head": use_head}):
                drafter.draft(target, ids[:, -1:], new, draft_cache, input_ids=ids, max_drafts=n)

        return run, lambda: None

    if hasattr(plain_cache, "activate_past_recording"):
        plain_cache.activate_past_recording()  # a sliding window has to be cropped
    prepare_rollback(round_cache)
    found: dict[tuple[str, int], tuple] = {("target", 1): forward(plain_cache, 1)}
    found |= {("verify", n + 1): forward(round_cache, n + 1) for n in lengths}
    found |= {("draft", n): draft(n, True) for n in lengths}
    found["base", max(lengths)] = draft(max(lengths), False)
    yield found


@torch.no_grad()
def time_passes(target, drafter, ids: torch.Tensor, lengths: list[int], takes: int = TAKES) -> dict:
    """Median seconds of each of `passes`, taken in turn, each time from another one on, after a round of warm-up."""
    seconds: dict[tuple[str, int], list[float]] = {}
    with passes(target, drafter, ids, lengths) as found:
        names = list(found)
        for take in range(takes + 1):
            for name in names[take % len(names) :] + names[: take % len(names)]:
                run, undo = found[name]
                synchronize(target.device)
                started = time.perf_counter()
                run()
                synchronize(target.device)
                if take:
                    seconds.setdefault(name, []).append(time.perf_counter() - started)
                undo()
    return {name: statistics.median(taken) for name, taken in seconds.items()}


# Forwards inside `generate` -----------------------------------------------------------------------------------------


def watch(target, inputs: dict, options: dict, drafter=None, force: list[int] | None = None, wait: bool = True):
    """One `generate`, its time after the prefill split into drafting, target forwards and the rest, the loop.

    Args:
        options: of `generate`. drafter: drafts whole blocks; None decodes plainly.
        force: as `forced_acceptance` takes it.
        wait: let an asynchronous device finish around each forward; only then the split means something there.
    Returns:
        dict: `sequences`; `tokens` after the first of the longest row, `all_tokens` of all rows, `rounds` (target
        forwards after the prefill), `tau` (over all rows), and `seconds`, `draft`, `verify`, `loop` after the prefill.
    """
    assisted = {} if drafter is None else {"assistant_model": drafter}
    knobs = WHOLE_BLOCKS | {"synchronize_timers": wait}
    with (
        nullcontext() if drafter is None else drafting(drafter, **knobs),
        nullcontext() if force is None else forced_acceptance(target, force),
        timed_forwards(target, wait) as spans,
    ):
        sequences = target.generate(**inputs, **options, **assisted)
        synchronize(target.device)
        stopped = time.perf_counter()
    new = ended(target, sequences[:, inputs["input_ids"].shape[1] :])
    rounds, seconds = len(spans) - 1, stopped - spans[0][1]
    draft = 0.0 if drafter is None else drafter.last_speculation.draft_seconds
    verify = sum(lasted(spans[1:]))
    return {
        "sequences": sequences,
        "tokens": max(map(len, new)) - 1,
        "all_tokens": sum(map(len, new)) - len(new),
        "rounds": rounds,
        "tau": 1.0 if drafter is None else drafter.last_speculation.mean_acceptance_length,
        "seconds": seconds,
        "draft": draft,
        "verify": verify,
        "loop": seconds - draft - verify,
    }


def profile(target, drafter, batches, options: dict, lengths: list[int] | None = None, force=None) -> dict:
    """Where a round's time goes, and how much of the limit arrives; medians over prompts, everything in turn.

    Args:
        batches: `generate` inputs; for each, a plain call, one with whole blocks, and all single forwards at the
            context half-way through the answer.
        options: of `generate`, greedy; `max_new_tokens` decides how long a call is.
        lengths (list[int], optional): numbers of drafts to time; default 1 to all. force: as `watch` takes it.
    Returns:
        dict: seconds by name, `report.profile_rows` has the words. "achieved" is the speedup after the
        prefill; in a batch it also bears that rows end in different rounds, which the limit does not. What `generate`
        spends on taking the prompt into the drafter counts as drafting.
    Raises:
        ValueError: no prompt with an answer of more than one token.
    """
    drafts = drafter.config.num_drafts
    lengths = sorted({*(lengths or range(1, drafts + 1)), drafts})
    repeats: list[dict] = []
    for number, inputs in enumerate(batches):
        if number == 0:
            for who in (None, drafter):  # warm-up
                watch(target, inputs, options | {"max_new_tokens": 4}, who, force if who else None)
        order = (None, drafter) if number % 2 else (drafter, None)
        waits = target.device.type != "cuda"
        calls = {who is not None: watch(target, inputs, options, who, force if who else None, waits) for who in order}
        plain, ours = calls[False], calls[True]
        # Waiting costs an asynchronous device its head start: there the split comes from a call of its own.
        split = ours if waits else watch(target, inputs, options, drafter, force)
        if not plain["rounds"] or not ours["rounds"]:
            continue
        width = inputs["input_ids"].shape[1] + plain["tokens"] // 2
        taken = time_passes(target, drafter, plain["sequences"][:, :width], lengths)
        repeats.append(_repeat(plain, ours, split, width, taken))
    if not repeats:
        raise ValueError("no prompt was answered with more than one token; profile other prompts.")
    result = {name: statistics.median(repeat[name] for repeat in repeats) for name in repeats[0] if name != "passes"}
    for kind in ("verify", "draft"):
        counts = sorted(n for name, n in repeats[0]["passes"] if name == kind)
        result[f"{kind}_by_tokens"] = {
            str(n): statistics.median(repeat["passes"][kind, n] for repeat in repeats) for n in counts
        }
    result["ratio_quartiles"] = quartiles(repeat["ratio"] for repeat in repeats)
    batch_size = len(plain["sequences"])
    return {"batch_size": batch_size, "drafts": drafts, "prompts": len(repeats), "force": force} | result


def _repeat(plain: dict, ours: dict, split: dict, context: int, taken: dict) -> dict:
    """All numbers of one prompt; a round's forwards by themselves are the `taken`."""
    drafts = max(n for kind, n in taken if kind == "draft")
    draft, verify, base = taken["draft", drafts], taken["verify", drafts + 1], taken["base", drafts]
    token = plain["seconds"] / plain["rounds"]
    round_seconds = ours["seconds"] / ours["rounds"]
    achieved = plain["seconds"] / plain["all_tokens"] / (ours["seconds"] / ours["all_tokens"])
    limit = ours["tau"] * token / (draft + verify)
    loop = split["loop"] / split["rounds"]
    return {
        "context": context,
        "target_forward": taken["target", 1],
        "target_generate": token,
        "draft": draft,
        "base_draft": base,
        "verify": verify,
        "head_share": (draft - base) / (draft + verify),
        "head_on_top": draft / base - 1,
        "tau": ours["tau"],
        "round": round_seconds,
        "round_draft": split["draft"] / split["rounds"],
        "round_verify": split["verify"] / split["rounds"],
        "loop": loop,
        "kept": 1 - split["loop"] / split["seconds"],
        "loop_share": loop / taken["target", 1],
        "achieved": achieved,
        "limit": limit,
        "ratio": achieved / limit,
        "passes": taken,
    }
