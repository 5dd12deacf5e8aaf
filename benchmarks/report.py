"""What a benchmark shows: summaries over prompts, tables, a plot, and the README's block.

All of it is made from the rows of `compare.run` or from the JSON written of them, so a published number can
be traced to a file in the repository.
"""

from __future__ import annotations

import statistics
import sys
import textwrap
from pathlib import Path

from domino_spec.benchmarks.timing import quartiles
from domino_spec.training.card import new_figure, save_figure
from rich.console import Console
from rich.table import Table

# A benchmark's JSON says which fields it has.
FORMAT = 2
MAIN_BLOCK = "benchmark"
GROUPS = ("all", "looping", "not looping")
LOOP_NGRAM, LOOP_SHARE, LOOP_LEAST = 4, 0.5, 16
SPLIT = ("prefill", "draft", "verify", "loop")
PART_WORDS = ("prefill", "drafting", "target forwards", "everything else")

DEFINITIONS = f"""\
- tau: (new tokens - 1) / (target forwards - 1), counted by a hook on the target for every method alike; in a batch, a
  row's kept tokens over its rounds. The mean sums tokens and rounds over a set's prompts.
- wall clock: tokens per second of whole `generate` calls over those of plain `generate`, same prompts, batch size and
  process, methods in turn at every prompt; of the set as a whole, then the median over prompts with its quartiles.
- looping answers: of at least {LOOP_LEAST} tokens, with less than half as many distinct {LOOP_NGRAM}-grams as
  {LOOP_NGRAM}-grams in plain decoding's answer. Copying (prompt lookup, Domino's lookup) thrives on them.
- texts equal: greedy answers that are plain decoding's, token by token. Exactness is a promise in float32; in bfloat16
  one-token and many-token forwards round apart, with or without a drafter."""
METHOD_WORDS = """\
- lookup: the library's prompt lookup. assistant: its assisted generation with a small model. parallel only: this
  drafter with its head off, which is what DFlash is. domino: head on, token after token; both with whole blocks every
  round. adaptive: Domino as it decides for itself, with lookup continuations unless it says "no lookup"."""


# Numbers ------------------------------------------------------------------------------------------------------------


def loops(ids: list[int]) -> bool:
    """Whether an answer repeats itself: fewer than half as many distinct 4-grams as 4-grams."""
    grams = list(zip(*(ids[i:] for i in range(LOOP_NGRAM)), strict=False))
    return len(ids) >= LOOP_LEAST and len(set(grams)) < LOOP_SHARE * len(grams)


def tau_of(results: list[dict]) -> tuple[float, list[float]]:
    """Mean over a set (summed tokens / summed rounds) and quartiles over its prompts; plain's 1 without any round."""
    pairs = [(len(r["ids"]) - 1, r["rounds"]) for r in results if r["rounds"]]
    if not pairs:
        return 1.0, [1.0] * 3
    tokens, rounds = map(sum, zip(*pairs, strict=True))
    return tokens / rounds, quartiles(t / n for t, n in pairs)


def speed(results: list[dict]) -> float:
    """New tokens a second; sampled texts differ in length, so seconds alone would not compare."""
    return sum(len(r["ids"]) for r in results) / sum(r["seconds"] for r in results)


def acceptance(results: list[dict]) -> list[float]:
    """Share of all rounds in which draft i was kept."""
    rounds = [kept for r in results for kept in r.get("accepted", ())]
    return [sum(kept > i for kept in rounds) / len(rounds) for i in range(max(rounds, default=0))]


def _group(plain: list[dict], results: list[dict]) -> dict:
    tau, tau_quartiles = tau_of(results)
    ratios = [speed([r]) / speed([p]) for p, r in zip(plain, results, strict=True)]
    return {
        "prompts": len(results),
        "tau_mean": tau,
        "tau_median": tau_quartiles[1],
        "tau_quartiles": tau_quartiles,
        "tokens_per_second": speed(results),
        "speedup": speed(results) / speed(plain),
        "speedup_mean": statistics.fmean(ratios),
        "speedup_median": statistics.median(ratios),
        "speedup_quartiles": quartiles(ratios),
    }


def summarise(runs: dict[str, list[dict]], greedy: bool = True) -> dict[str, dict]:
    """Per method: tau and speed against plain, of all prompts and of those whose plain answer loops or does not.

    Args:
        runs: per method, "plain" among them, rows of `compare.run` in the order of the prompts.
        greedy: texts must be equal; sampled ones need not, and are not compared.
    """
    plain = runs["plain"]
    looping = [loops(row["ids"]) for row in plain]
    members = {
        "all": range(len(plain)),
        "looping": [i for i, loop in enumerate(looping) if loop],
        "not looping": [i for i, loop in enumerate(looping) if not loop],
    }
    summary = {}
    for method, results in runs.items():
        groups = {
            name: _group([plain[i] for i in chosen], [results[i] for i in chosen])
            for name, chosen in members.items()
            if chosen
        }
        equal = sum(p["ids"] == r["ids"] for p, r in zip(plain, results, strict=True))
        summary[method] = {
            "groups": groups,
            "prompts": len(results),
            "equal_texts": equal if greedy else None,
            "tokens": sum(len(r["ids"]) for r in results),
            "seconds": sum(r["seconds"] for r in results),
            "split": split_of(results),
            "acceptance": acceptance(results),
        }
    return summary


def split_of(results: list[dict]) -> dict[str, float] | None:
    """Seconds by what they went to; None where the device was not waited for."""
    if any(r.get("draft_seconds") is None for r in results):
        return None
    parts = {name: sum(r[f"{name}_seconds"] for r in results) for name in SPLIT[:-1]}
    return parts | {"loop": sum(r["seconds"] for r in results) - sum(parts.values())}


# What is set against what, and whether the loop may copy in both.
RIVALS = (
    ("adaptive", "lookup", "Domino (adaptive) over prompt lookup"),
    ("adaptive", "assistant", "Domino (adaptive) over the assistant"),
    ("domino", "parallel only", "Domino over parallel only, whole blocks"),
    ("adaptive, no lookup", "adaptive, parallel only", "Domino over parallel only, adaptive, no lookup"),
    ("adaptive, no lookup", "parallel only", "Domino (adaptive, no lookup) over parallel only (whole blocks)"),
    ("adaptive", "plain", "Domino (adaptive) over plain"),
)


def comparisons(sets: dict[str, dict]) -> list[dict]:
    """Wall clock of one method over another's at each temperature and batch size: mean over sets, least, most."""
    found = []
    for (temperature, batch_size), chosen in settings_of(sets).items():
        for ours, theirs, words in RIVALS:
            pairs = [(s["methods"][ours], s["methods"][theirs]) for s in chosen if {ours, theirs} <= set(s["methods"])]
            for group in GROUPS if pairs else ():
                ratios = [
                    a["groups"][group]["speedup"] / b["groups"][group]["speedup"]
                    for a, b in pairs
                    if group in a["groups"]
                ]
                if ratios:
                    found.append(
                        {
                            "words": words,
                            "temperature": temperature,
                            "batch_size": batch_size,
                            "group": group,
                            "sets": len(ratios),
                            "mean": statistics.fmean(ratios),
                            "least": min(ratios),
                            "most": max(ratios),
                        }
                    )
    return found


# Tables -------------------------------------------------------------------------------------------------------------


def wide_console() -> Console:
    """A console whose tables stay readable in a log file."""
    return Console(width=None if sys.stdout.isatty() else 150)


def table_of(title: str, columns: list[str], rows: list[list[str]]) -> Table:
    """A rich table, first column to the left."""
    table = Table(title=title)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    return table


def _equal(row: dict) -> str:
    return "-" if row["equal_texts"] is None else f"{row['equal_texts']}/{row['prompts']}"


def _spread(values: list[float]) -> str:
    return f"{values[1]:.2f} [{values[0]:.2f}, {values[2]:.2f}]"


def set_table(title: str, methods: dict[str, dict]) -> Table:
    """One set."""
    columns = ["method", "tau mean", "median [quartiles]", "tokens/s", "wall clock", "median [quartiles]"]
    columns += ["looping", "not looping", "texts equal", f"s: {' / '.join(SPLIT)}"]
    rows = []
    for method, row in methods.items():
        whole, split = row["groups"]["all"], row["split"]
        rows.append(
            [
                method,
                f"{whole['tau_mean']:.2f}",
                _spread(whole["tau_quartiles"]),
                f"{whole['tokens_per_second']:.1f}",
                f"{whole['speedup']:.2f}x",
                _spread(whole["speedup_quartiles"]),
                *(f"{row['groups'][g]['speedup']:.2f}x" if g in row["groups"] else "-" for g in GROUPS[1:]),
                _equal(row),
                "-" if split is None else " / ".join(f"{split[name]:.1f}" for name in SPLIT),
            ]
        )
    return table_of(title, columns, rows)


def profile_rows(profile: dict) -> list[list[str]]:
    """Profile as pairs of words and number."""
    n, low_high = profile["drafts"], profile["ratio_quartiles"]

    def ms(name: str) -> str:
        return f"{1000 * profile[name]:.2f} ms"

    return [
        ["T_target(1), bare forward", ms("target_forward")],
        ["T_target(1), a token of plain generate", ms("target_generate")],
        [f"T_verify({n + 1})", ms("verify")],
        [f"T_draft({n}), head on", ms("draft")],
        [f"T_draft({n}), head off", ms("base_draft")],
        ["head, share of draft + verify", f"{profile['head_share']:.1%}"],
        ["a round inside generate", ms("round")],
        ["of it drafting", ms("round_draft")],
        ["of it target forward", ms("round_verify")],
        ["of it everything else (loop)", f"{ms('loop')}, {profile['loop_share']:.1%} of the bare forward"],
        ["share of the round that is drafting and target forward", f"{profile['kept']:.1%}"],
        ["tau", f"{profile['tau']:.2f}"],
        ["speedup after the prefill", f"{profile['achieved']:.2f}x"],
        ["limit: tau T_target(1) / (T_draft + T_verify)", f"{profile['limit']:.2f}x"],
        ["achieved / limit", f"{profile['ratio']:.2f} [{low_high[0]:.2f}, {low_high[2]:.2f}]"],
    ]


def profile_table(profile: dict) -> Table:
    """Where a round's time goes."""
    title = f"profile: batch {profile['batch_size']}, context {profile['context']:.0f}, {profile['prompts']} prompts"
    rows = profile_rows(profile)
    for kind in ("verify", "draft"):
        times = ", ".join(f"{n}: {1000 * s:.1f}" for n, s in profile[f"{kind}_by_tokens"].items())
        rows.append([f"T_{kind}(n) in ms", times])
    return table_of(title, ["", "median"], rows)


# Plot ---------------------------------------------------------------------------------------------------------------


def settings_of(sets: dict[str, dict]) -> dict[tuple[float, int], list[dict]]:
    """Sets by temperature and batch size."""
    found: dict[tuple[float, int], list[dict]] = {}
    for entry in sets.values():
        found.setdefault((entry["temperature"], entry["batch_size"]), []).append(entry)
    return found


def words_of(temperature: float, batch_size: int) -> str:
    """A setting in words."""
    law = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    return f"{law}, batch {batch_size}"


def plot(report: dict, path: str | Path) -> None:
    """Speedup and tau by setting, set and method, acceptance by draft, and where the seconds go; written as PNG."""
    sets = report["sets"]
    settings = settings_of(sets)
    colours = {m: f"C{i}" for i, m in enumerate(dict.fromkeys(m for s in sets.values() for m in s["methods"]))}
    rows = len(settings) + 1
    figure, axes = new_figure(rows, 3.4 * rows, 2, 14, shared=False)
    for pair, (setting, chosen) in zip(axes[:-1], settings.items(), strict=True):
        for axis, name, words in zip(pair, ("speedup", "tau"), ("wall clock over plain", "tau"), strict=True):
            _draw_bars(axis, chosen, colours, name)
            axis.set_ylabel(words)
            axis.set_title(words_of(*setting), fontsize=10)
    handles = [figure.axes[0].bar(0, 0, color=colour) for colour in colours.values()]
    figure.legend(handles, list(colours), loc="outside upper center", ncols=len(colours), fontsize=9)
    _draw_acceptance(axes[-1, 0], sets, colours)
    _draw_split(axes[-1, 1], sets)
    save_figure(figure, str(path))


def _draw_bars(axis, sets: list[dict], colours: dict, name: str) -> None:
    """A group of bars for each set: the whole set's value, and a line from quartile to quartile over prompts."""
    share = 0.85 / len(colours)
    for place, entry in enumerate(sets):
        for i, (method, row) in enumerate(entry["methods"].items()):
            whole = row["groups"]["all"]
            value = whole["speedup" if name == "speedup" else "tau_mean"]
            low, _, high = whole[f"{name}_quartiles"]
            x = place + (i + 0.5 - len(entry["methods"]) / 2) * share
            axis.bar(x, value, share, color=colours[method])
            axis.plot([x, x], [low, high], color="black", linewidth=1)
            axis.annotate(f"{value:.2f}", (x, max(value, high)), ha="center", va="bottom", fontsize=7, rotation=90)
    axis.set_xticks(range(len(sets)), [entry["name"] for entry in sets], fontsize=9)
    axis.axhline(1, color="black", linewidth=1)
    axis.margins(y=0.15)
    axis.grid(axis="y", alpha=0.3)


def _draw_acceptance(axis, sets: dict, colours: dict) -> None:
    """Methods that draft, mean over sets."""
    for method, colour in colours.items():
        curves = [s["methods"][method]["acceptance"] for s in sets.values() if method in s["methods"]]
        curves = [curve for curve in curves if curve]
        if curves:
            longest = max(map(len, curves))
            padded = [curve + [0.0] * (longest - len(curve)) for curve in curves]
            means = [100 * statistics.fmean(values) for values in zip(*padded, strict=True)]
            axis.plot(range(1, longest + 1), means, "o-", color=colour, label=method, markersize=4)
    axis.set_xlabel("draft")
    axis.set_ylabel("rounds in which it was kept, %")
    axis.grid(alpha=0.3)
    if axis.lines:
        axis.legend(fontsize=8)


def _draw_split(axis, sets: dict) -> None:
    """Milliseconds per token by what they went to, batch 1 before others, mean over sets."""
    parts: dict[str, list[list[float]]] = {}
    least = min(s["batch_size"] for s in sets.values())
    for entry in sets.values():
        for method, row in entry["methods"].items():
            if entry["batch_size"] == least and row["split"] is not None:
                parts.setdefault(method, []).append([1000 * row["split"][p] / row["tokens"] for p in SPLIT])
    left = [0.0] * len(parts)
    for i, words in enumerate(PART_WORDS):
        values = [statistics.fmean(columns[i] for columns in rows) for rows in parts.values()]
        axis.barh(range(len(parts)), values, left=left, label=words, color=f"C{i}")
        left = [a + max(b, 0.0) for a, b in zip(left, values, strict=True)]
    axis.set_yticks(range(len(parts)), list(parts), fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel(f"ms per token, batch {least}" if parts else "no time split: the device was not waited for")
    if parts:
        axis.legend(fontsize=8)


# Markdown -----------------------------------------------------------------------------------------------------------


def wrapped(text: str, indent: str = "") -> str:
    """A paragraph in lines of the README's width."""
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _markdown_table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def markdown(report: dict, image: str | None = None, definitions: bool = True) -> str:
    """The README's block: what ran, what the words mean, every row, and where speculation lost.

    Args:
        report: a benchmark's JSON. image: the plot, as the README links to it. definitions: False where another block
            of the same README tells them.
    """
    machine, arguments = report["machine"], report["arguments"]
    blocks = [
        f"{arguments['target_model_name_or_path']}, {arguments['dtype']}, at most {arguments['max_new_tokens']} new "
        f"tokens, up to {arguments['max_prompts']} prompts of each set, one process, {machine['threads']} thread(s) "
        f"on {machine['hardware']}; torch {machine['torch']}, transformers {machine['transformers']}, commit "
        f"{machine['commit']}. Written by `benchmarks/compare.py` from its JSON.",
        *([DEFINITIONS + "\n" + METHOD_WORDS] if definitions else []),
    ]
    blocks[0] = wrapped(blocks[0])
    for setting, chosen in settings_of(report["sets"]).items():
        words = words_of(*setting)
        blocks.append(f"**{words[0].upper()}{words[1:]}**")
        blocks.append(_sets_table(chosen))
    compared = comparisons(report["sets"])
    if compared:
        blocks.append("Wall clock of one method over another's, mean over sets (least, most):")
        blocks.append(_comparison_table(compared))
    blocks.append(_losses(report["sets"]))
    for profile in report.get("profiles", []):
        words = (
            f"**Where a round's time goes** (whole blocks, greedy, batch {profile['batch_size']}, context about "
            f"{profile['context']:.0f} tokens, medians over {profile['prompts']} prompts). The limit is taken with "
            "plain `generate`'s own time per token, and with forwards measured outside the loop."
        )
        blocks.append(wrapped(words))
        blocks.append(_markdown_table(["", "median"], profile_rows(profile)))
    if image:
        blocks.append(f"![speed, tau, acceptance and time split]({image})")
    return "\n\n".join(blocks)


def _sets_table(sets: list[dict]) -> str:
    columns = ["set", "method", "tau: mean", "median [quartiles]", "wall clock", "median [quartiles]"]
    columns += ["looping answers", "others", "texts equal"]
    rows = []
    for entry in sets:
        for method, row in entry["methods"].items():
            whole = row["groups"]["all"]
            parts = [row["groups"].get(group) for group in GROUPS[1:]]
            rows.append(
                [
                    entry["name"],
                    method,
                    f"{whole['tau_mean']:.2f}",
                    _spread(whole["tau_quartiles"]),
                    f"{whole['speedup']:.2f}x",
                    _spread(whole["speedup_quartiles"]),
                    *(
                        "-" if p is None else f"{p['speedup']:.2f}x, tau {p['tau_mean']:.2f} ({p['prompts']})"
                        for p in parts
                    ),
                    _equal(row),
                ]
            )
    return _markdown_table(columns, rows)


def _comparison_table(compared: list[dict]) -> str:
    columns = ["", *GROUPS[:1], *(f"{group} answers" for group in GROUPS[1:])]
    rows: dict[str, dict[str, str]] = {}
    for row in compared:
        words = f"{row['words']}; {words_of(row['temperature'], row['batch_size'])}"
        rows.setdefault(words, {})[row["group"]] = f"{row['mean']:.2f} ({row['least']:.2f}, {row['most']:.2f})"
    return _markdown_table(columns, [[words, *(cells.get(g, "-") for g in GROUPS)] for words, cells in rows.items()])


def _losses(sets: dict[str, dict]) -> str:
    """The unfavourable rows, named: Domino's methods that were slower than plain or than prompt lookup."""
    found: dict[str, list[str]] = {}
    for title, entry in sets.items():
        methods = entry["methods"]
        for rival in ("plain", "lookup", "assistant"):
            for method, row in methods.items():
                if rival not in methods or not method.startswith(("domino", "adaptive", "parallel")):
                    continue
                ratio = row["groups"]["all"]["speedup"] / methods[rival]["groups"]["all"]["speedup"]
                if ratio < 1:
                    found.setdefault(rival, []).append(f"{method} on {title} ({ratio:.2f}x)")
    if not found:
        return "Nothing that drafts with Domino was slower than plain decoding or a rival in this run."
    words = {"plain": "plain decoding", "lookup": "prompt lookup", "assistant": "the assistant"}
    lines = [f"- Slower than {words[rival]}: {'; '.join(rows)}." for rival, rows in found.items()]
    return "\n".join(wrapped(line, "  ") for line in lines)


def replace_block(text: str, block: str, name: str = MAIN_BLOCK) -> str:
    """`text` with `block` between the markers of this name.

    Raises:
        ValueError: not exactly one pair of markers.
    """
    opening, closing = f"<!-- {name} -->", f"<!-- /{name} -->"
    if text.count(opening) != 1 or text.count(closing) != 1 or text.index(opening) > text.index(closing):
        raise ValueError(
            f"the README has {text.count(opening)} '{opening}' and {text.count(closing)} '{closing}'; "
            "expected one of each, in this order: put them where the block belongs."
        )
    before, rest = text.split(opening)
    return f"{before}{opening}\n{block}\n{closing}{rest.split(closing)[1]}"
