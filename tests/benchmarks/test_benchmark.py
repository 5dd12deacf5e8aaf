"""The benchmark: counts that an independent count confirms, exactness that is really checked, sums done by hand."""

import json

import pytest
import torch
from domino_spec import generation_domino
from domino_spec.benchmarks import compare, gpu
from domino_spec.benchmarks import context as context_module
from domino_spec.benchmarks.compare import KNOBS, METHODS, methods_for, run, run_set
from domino_spec.benchmarks.report import (
    acceptance,
    comparisons,
    loops,
    markdown,
    replace_block,
    split_of,
    summarise,
    tau_of,
)
from domino_spec.benchmarks.timing import drafting, forced_acceptance, passes, profile, quartiles, watch
from tiny import BLOCK, VOCAB, make_drafter, make_target, prompt_ids, ragged, save_target

OPENING, CLOSING = "<!-- benchmark -->", "<!-- /benchmark -->"
GREEDY = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 62}


def one_prompt(seed: int = 3, batch: int = 1) -> dict[str, torch.Tensor]:
    ids = prompt_ids(9, batch, seed)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def accept_one_too_many(monkeypatch):
    """A loop that keeps a draft the target disagrees with, wherever one was rejected."""

    def wrong(block, start, end=None):
        """The draft that follows is made the choice."""
        logits = right(block, start, end)
        if start < block.drafts:
            logits = logits.clone()
            logits[:, 0].scatter_(1, block.ids[:, start + 1 : start + 2], 1e4)
        return logits

    right = generation_domino.Block.logits
    monkeypatch.setattr(generation_domino.Block, "logits", wrong)


# One run ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models():
    target = make_target()
    return target, make_drafter(target), make_target(seed=7)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_counted_right_and_exact(models, method, monkeypatch):
    target, drafter, assistant = models
    plain = run("plain", target, drafter, one_prompt(), GREEDY)[0]
    calls, forward = [], target.forward
    monkeypatch.setattr(target, "forward", lambda *a, **k: calls.append(1) or forward(*a, **k))
    row = run(method, target, drafter, one_prompt(), GREEDY, assistant)[0]
    assert row["ids"] == plain["ids"] and len(row["ids"]) == 20
    assert row["rounds"] == len(calls) - 1
    if method in KNOBS:
        assert len(row["accepted"]) == row["rounds"]
        assert sum(row["accepted"]) + row["rounds"] == 19
    if method == "plain":
        assert row["rounds"] == 19
    parts = [row[f"{part}_seconds"] for part in ("prefill", "draft", "verify")]
    assert all(part >= 0 for part in parts) and sum(parts) <= row["seconds"]
    assert (row["draft_seconds"] > 0) == (method in KNOBS or method == "assistant")


@pytest.mark.parametrize("method", ["plain", "parallel only", "domino", "adaptive"])
def test_rows_of_a_batch_have_rounds_of_their_own(models, method):
    target, drafter, _ = models
    inputs = ragged([5, 9])
    rows = run(method, target, drafter, inputs, GREEDY)
    assert len(rows) == 2
    for row in rows:
        assert len(row["ids"]) == 20
        assert row["rounds"] == 19 if method == "plain" else row["rounds"] == len(row["accepted"])


def test_head_and_rollout_are_what_the_name_says(models):
    target, drafter, _ = models
    seen = []
    own = drafter.draft

    def draft(*args, **kwargs):
        knobs = drafter.generation_config
        seen.append((knobs.use_head, knobs.rollout, knobs.num_assistant_tokens_schedule))
        return own(*args, **kwargs)

    drafter.draft = draft
    try:
        for method in KNOBS:
            run(method, target, drafter, one_prompt(), GREEDY)
            expected = KNOBS[method]
            assert set(seen) == {
                (expected["use_head"], expected["rollout"], expected["num_assistant_tokens_schedule"])
            }
            seen.clear()
    finally:
        del drafter.draft


def test_knobs_are_the_users_again_also_after_an_error(models):
    drafter = models[1]
    before = dict(vars(drafter.generation_config))
    with pytest.raises(KeyError), drafting(drafter, use_head=False, rollout="parallel"):
        assert drafter.generation_config.rollout == "parallel"
        raise KeyError
    assert vars(drafter.generation_config) == before


def test_statistics_that_count_otherwise_stop_the_run(models, monkeypatch):
    target, drafter, _ = models
    whole = drafter.speculative_decode

    def decode(*args, **kwargs):
        output = whole(*args, **kwargs)
        drafter.last_speculation.num_rounds += 1
        return output

    monkeypatch.setattr(drafter, "speculative_decode", decode)
    with pytest.raises(RuntimeError, match="the hook counted"):
        run("domino", target, drafter, one_prompt(), GREEDY)


def test_a_loop_that_keeps_a_wrong_token_is_flagged(models, monkeypatch):
    target, drafter, _ = models
    inputs = [one_prompt(seed) for seed in range(3)]
    methods = ["plain", "lookup", "domino"]
    right = summarise(run_set(methods, target, drafter, inputs, GREEDY))
    assert [right[m]["equal_texts"] for m in methods] == [3, 3, 3]
    accept_one_too_many(monkeypatch)
    wrong = summarise(run_set(methods, target, drafter, inputs, GREEDY))
    assert wrong["lookup"]["equal_texts"] == 3 and wrong["domino"]["equal_texts"] < 3


def test_who_takes_part():
    asked = ["assistant", "lookup", "plain", "domino", "domino, parallel rollout", "domino"]
    assert methods_for(asked, 0, 1, None) == (["plain", "lookup", "domino", "domino, parallel rollout"], [])
    assert methods_for(asked, 0, 1, object())[0][1] == "assistant"
    methods, notes = methods_for(asked, 0.7, 4, object())
    assert methods == ["plain", "domino"] and len(notes) == 3


# Sums ---------------------------------------------------------------------------------------------------------------


def row(tokens, rounds, seconds, **more):
    ids = list(range(tokens)) if isinstance(tokens, int) else tokens
    return {"ids": ids, "rounds": rounds, "seconds": seconds} | more


def hand_made() -> dict[str, list[dict]]:
    split = {"prefill_seconds": 0.25, "draft_seconds": 0.5, "verify_seconds": 1.0}
    loop = [1, 2] * 10  # 20 tokens, 2 distinct 4-grams
    return {
        "plain": [row(11, 10, 10.0, **split), row(loop, 19, 10.0, **split)],
        "lookup": [row(11, 10, 20.0, **split), row(loop, 4, 5.0, **split)],
        "adaptive": [
            row(11, 5, 5.0, accepted=[1, 1, 1, 1, 1], **split),
            row([*loop[:-1], 9], 5, 2.0, accepted=[3, 2, 0], **split),
        ],
    }


def test_loops():
    assert loops([1, 2] * 10) and loops([7] * 16)
    assert not loops(list(range(40))) and not loops([7] * 15) and not loops([])
    assert not loops([*range(20), *range(20)])  # said twice: 23 of 37


def test_quartiles_and_tau():
    assert quartiles([3]) == [3, 3, 3] and quartiles([1, 2, 3, 4, 5]) == [2, 3, 4]
    rows = [row(11, 5, 1.0), row(7, 6, 1.0), row(1, 0, 1.0)]
    mean, (low, median, high) = tau_of(rows)
    assert mean == pytest.approx(16 / 11) and (low, median, high) == pytest.approx((1.25, 1.5, 1.75))
    assert tau_of([row(1, 0, 1.0)])[0] == 1


def test_summary_of_hand_made_rows():
    summary = summarise(hand_made())
    ours = summary["adaptive"]
    whole = ours["groups"]["all"]
    assert whole["tau_mean"] == pytest.approx(29 / 10) and whole["tau_median"] == pytest.approx((2 + 19 / 5) / 2)
    assert whole["tokens_per_second"] == pytest.approx(31 / 7)
    assert whole["speedup"] == pytest.approx((31 / 7) / (31 / 20))
    assert whole["speedup_mean"] == whole["speedup_median"] == pytest.approx(3.5)
    assert ours["groups"]["looping"]["prompts"] == 1
    assert ours["groups"]["looping"]["speedup"] == pytest.approx(5)
    assert ours["groups"]["not looping"]["speedup"] == pytest.approx(2)
    assert [summary[m]["equal_texts"] for m in summary] == [2, 2, 1]
    assert ours["acceptance"] == pytest.approx([7 / 8, 2 / 8, 1 / 8])
    assert ours["split"] == pytest.approx({"prefill": 0.5, "draft": 1.0, "verify": 2.0, "loop": 3.5})
    assert summarise(hand_made(), greedy=False)["adaptive"]["equal_texts"] is None


def test_no_split_where_nobody_waited():
    assert split_of([row(3, 2, 1.0, draft_seconds=None)]) is None
    assert acceptance([row(3, 2, 1.0)]) == []


def hand_made_report() -> dict:
    entry = {"name": "set", "temperature": 0.0, "batch_size": 1, "methods": summarise(hand_made())}
    machine = {"hardware": "a CPU", "threads": "1", "torch": "2", "transformers": "5", "commit": "abc"}
    arguments = {"target_model_name_or_path": "T", "dtype": "float32", "max_new_tokens": 20, "max_prompts": 2}
    return {"format": 2, "machine": machine, "arguments": arguments, "sets": {"set": entry}, "profiles": []}


def test_one_method_over_another():
    found = {(c["words"], c["group"]): c for c in comparisons(hand_made_report()["sets"])}
    lookup = found["Domino (adaptive) over prompt lookup", "all"]
    assert lookup["mean"] == lookup["least"] == pytest.approx(25 / 7)
    assert found["Domino (adaptive) over prompt lookup", "looping"]["mean"] == pytest.approx(2.5)
    assert not any(words.startswith("Domino over parallel only") for words, _ in found)


# README -------------------------------------------------------------------------------------------------------------


def test_the_block_names_hardware_definitions_and_what_lost():
    report = hand_made_report()
    block = markdown(report, "docs/benchmark.png")
    for words in (
        "a CPU",
        "float32",
        "commit abc",
        "tau: (new tokens - 1)",
        "| set | adaptive | 2.90 |",
        "1/2",
        "docs/b",
    ):
        assert words in block
    assert "Nothing that drafts with Domino was slower" in block
    slow = report["sets"]["set"]["methods"]["adaptive"]["groups"]["all"]
    slow["speedup"] = 0.9
    assert "- Slower than plain decoding: adaptive on set (0.90x)." in markdown(report)


def test_the_block_replaces_what_lies_between_the_markers():
    text = f"# Title\n{OPENING}\nold\n{CLOSING}\nrest\n"
    once = replace_block(text, "new\ntable")
    assert once == f"# Title\n{OPENING}\nnew\ntable\n{CLOSING}\nrest\n"
    assert replace_block(once, "new\ntable") == once
    for broken in ("nothing", OPENING, f"{CLOSING}{OPENING}", text + text):
        with pytest.raises(ValueError, match="expected one of each"):
            replace_block(broken, "new")
    other = f"<!-- batches -->\n<!-- /batches -->\n{once}"
    assert replace_block(other, "x", "batches") == f"<!-- batches -->\nx\n<!-- /batches -->\n{once}"


# Profile ------------------------------------------------------------------------------------------------------------


def test_profile_is_consistent(models):
    target, drafter, _ = models
    found = profile(target, drafter, [one_prompt()], GREEDY)
    drafts = drafter.config.num_drafts
    assert found["drafts"] == drafts and found["prompts"] == 1 and found["context"] == 9 + 9
    assert list(found["draft_by_tokens"]) == [str(n) for n in range(1, drafts + 1)]
    assert list(found["verify_by_tokens"]) == [str(n) for n in range(2, drafts + 2)]
    assert found["draft"] == found["draft_by_tokens"][str(drafts)]
    assert found["verify"] == found["verify_by_tokens"][str(drafts + 1)]
    both = found["draft"] + found["verify"]
    assert found["head_share"] == pytest.approx((found["draft"] - found["base_draft"]) / both)
    assert found["limit"] == pytest.approx(found["tau"] * found["target_generate"] / both)
    assert found["ratio"] == pytest.approx(found["achieved"] / found["limit"]) == pytest.approx(both / found["round"])
    assert found["round"] == pytest.approx(found["round_draft"] + found["round_verify"] + found["loop"])
    assert found["kept"] == pytest.approx(1 - found["loop"] / found["round"])
    assert 0 < found["loop"] and found["loop_share"] == pytest.approx(found["loop"] / found["target_forward"])


def test_a_profile_needs_an_answer(models):
    target, drafter, _ = models
    with pytest.raises(ValueError, match="profile other prompts"):
        profile(target, drafter, [one_prompt()], GREEDY | {"max_new_tokens": 1})


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_passes_leave_their_caches_as_they_were(family):
    target = make_target(family, **({"sliding_window": 8} if family == "mistral" else {}))
    drafter = make_drafter(target)
    lengths = []

    def keep(module, arguments, keywords):
        cache = keywords.get("cache", keywords.get("past_key_values"))
        if cache is not None:
            lengths.append(cache.get_seq_length())

    handle = target.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad(), passes(target, drafter, prompt_ids(12, 2), [1, BLOCK]) as found:
        kinds = {("target", 1), ("verify", 2), ("verify", BLOCK + 1), ("draft", 1), ("draft", BLOCK), ("base", BLOCK)}
        assert set(found) == kinds
        for _ in range(2):
            for do, undo in found.values():
                do()
                undo()
    handle.remove()
    assert lengths == [11] * 6


@pytest.mark.parametrize("pattern", [[0], [2], [BLOCK], [0, 3]])
def test_forced_acceptance(models, pattern):
    target, drafter, _ = models
    watch(target, one_prompt(batch=2), GREEDY | {"max_new_tokens": 40}, drafter, pattern)
    kept = drafter.last_speculation.accepted_drafts
    for accepted in kept:
        expected = [pattern[number % len(pattern)] for number in range(len(accepted))]
        assert accepted[:-1] == expected[:-1]
    handles = len(target._forward_hooks)
    with forced_acceptance(target, pattern):
        assert len(target._forward_hooks) == handles + 1
    assert len(target._forward_hooks) == handles


# Command line -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A target, a drafter, an assistant and prompts."""
    place = tmp_path_factory.mktemp("bench")
    target = save_target(place / "target")
    make_drafter(target).save_pretrained(place / "drafter")
    make_target(seed=7).save_pretrained(place / "assistant")
    for name in ("some", "others"):
        rows = [{"messages": [{"role": "user", "content": f"w{i} w{len(name)}"}]} for i in range(2)]
        (place / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (place / "data").mkdir()
    (place / "data" / "test.jsonl").write_text('{"prompt": "w3 w4 w5"}\n{"prompt": "w6 w7"}\n')
    (place / "odd").mkdir()
    (place / "odd" / "test.jsonl").write_text('{"question": "w3"}\n')
    return place


def command(place, *more) -> list[str]:
    models = [
        "--target_model_name_or_path",
        str(place / "target"),
        "--draft_model_name_or_path",
        str(place / "drafter"),
    ]
    return [*models, "--dtype", "float32", "--max_new_tokens", "12", *more]


def test_from_command_line_to_readme(directory, tmp_path, capsys):
    output = tmp_path / "docs"
    compare.main(
        command(directory, "--prompts", str(directory / "some.jsonl"), str(directory / "others.jsonl"))
        + ["--output_dir", str(output), "--temperature", "0", "0.7", "--profile", "--profile_prompts", "1"]
        + ["--assistant_model_name_or_path", str(directory / "assistant"), "--max_prompts", "1"]
    )
    report = json.loads((output / "benchmark.json").read_text())
    assert list(report["sets"]) == [f"{s}, batch 1, temperature {t}" for t in ("0", "0.7") for s in ("some", "others")]
    for entry in report["sets"].values():
        assert list(entry["methods"]) == ["plain", *compare.DEFAULT_METHODS]
        for method in entry["methods"].values():
            assert method["equal_texts"] == (1 if entry["temperature"] == 0 else None)
    assert len(report["profiles"]) == 1 and report["profiles"][0]["ratio"] > 0
    assert {"hardware", "torch", "transformers", "commit", "threads"} <= set(report["machine"])
    assert report["arguments"]["dtype"] == "float32" and str(directory) not in json.dumps(report)
    assert (output / "benchmark.png").read_bytes().startswith(b"\x89PNG")
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{OPENING}\n{CLOSING}\nafter\n")
    again = ["--from_json", str(output / "benchmark.json"), "--output_dir", str(output), "--readme", str(readme)]
    (output / "benchmark.png").unlink()
    compare.main(again)
    assert (output / "benchmark.png").read_bytes().startswith(b"\x89PNG")
    once = readme.read_text()
    assert once.startswith(f"before\n{OPENING}\n") and once.endswith(f"{CLOSING}\nafter\n")
    assert "(docs/benchmark.png)" in once and "achieved / limit" in once and "Temperature 0.7" in once
    compare.main(again)
    assert readme.read_text() == once
    assert markdown(report, "docs/benchmark.png") in once
    assert "achieved / limit" in capsys.readouterr().out


def test_batches_from_a_dataset(directory, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    compare.main(
        command(directory, "--dataset_name", str(directory / "data"), "--output_dir", str(tmp_path))
        + ["--batch_size", "2", "--methods", "lookup", "domino"]
    )
    entry = json.loads((tmp_path / "benchmark.json").read_text())["sets"]["data"]
    assert list(entry["methods"]) == ["plain", "domino"] and entry["methods"]["domino"]["equal_texts"] == 2
    assert "lookup takes one sequence at a time" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--prompts", "nowhere.jsonl"], "no prompts file 'nowhere.jsonl'"),
        ([], "no prompts; name JSONL files"),
        (["--prompts", "{place}/some.jsonl", "--max_prompts", "0"], "max_prompts is 0; expected at least 1"),
        (["--prompts", "{place}/some.jsonl", "--batch_size", "0"], "expected at least 1"),
        (["--prompts", "{place}/some.jsonl", "--no_sets"], "add --profile"),
        (["--prompts", "{place}/some.jsonl", "--methods", "assistant"], "needs a model"),
        (["--prompts", "{place}/odd/test.jsonl"], "expected `messages` or `prompt`"),
        (["--dataset_name", "{place}/odd"], "expected `messages` or `prompt`"),
        (["--from_json", "{place}/target/config.json"], "has the format None, expected 2"),
        (["--from_json", "{place}/some.jsonl"], "is no JSON"),
        (["--from_json", "{place}/nowhere.json"], "nowhere.json"),
    ],
)
def test_one_sentence_for_what_cannot_work(directory, tmp_path, monkeypatch, more, words):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    more = [word.format(place=directory) for word in more]
    with pytest.raises(SystemExit) as error:
        compare.main(command(directory, *more, "--output_dir", str(tmp_path)))
    assert str(error.value).startswith("compare: ") and words in str(error.value)


def test_an_assistant_of_another_vocabulary_is_refused(directory, tmp_path):
    make_target(vocab_size=VOCAB + 1).save_pretrained(tmp_path / "other")
    more = ["--prompts", str(directory / "some.jsonl"), "--assistant_model_name_or_path", str(tmp_path / "other")]
    with pytest.raises(SystemExit, match="vocabulary of 65 and the target one of 64"):
        compare.main(command(directory, *more, "--output_dir", str(tmp_path)))


# GPU check, on tiny shapes ------------------------------------------------------------------------------------------

SHORT = ["--tiny", "--max_new_tokens", "12", "--prompt_tokens", "8", "--repeats", "1", "--batch_size", "2"]


def test_the_gpu_check_runs_whole(tmp_path, capsys):
    gpu.main([*SHORT, "--accepted", "4", "mixed", "--output_dir", str(tmp_path)])
    report = json.loads((tmp_path / "benchmark_gpu.json").read_text())
    assert report["lossless"]["equal_texts"] == report["lossless"]["texts"] > 0
    assert report["lossless"]["accepted_drafts"] > report["lossless"]["texts"]
    assert [cell["accepted"] for cell in report["cells"]] == ["4", "mixed"] and not report["left_out"]
    cell = report["cells"][0]
    assert cell["tau"] == pytest.approx(11 / 3)  # 5, 5 and the last token
    assert list(cell["verify_by_tokens"]) == ["16"] and list(cell["draft_by_tokens"]) == ["15"]
    assert "Qwen3-8B" not in capsys.readouterr().out


def test_the_gpu_check_stops_when_time_is_up_and_when_texts_differ(tmp_path, monkeypatch):
    accept_one_too_many(monkeypatch)
    with pytest.raises(SystemExit, match="texts differ from plain decoding's"):
        gpu.main([*SHORT, "--budget_seconds", "0", "--output_dir", str(tmp_path)])
    report = json.loads((tmp_path / "benchmark_gpu.json").read_text())
    assert report["cells"] == [] and len(report["left_out"]) == 5


@pytest.mark.skipif(torch.cuda.is_available(), reason="says so only without a GPU")
def test_without_a_gpu_it_says_so(tmp_path):
    with pytest.raises(SystemExit, match="no CUDA GPU here"):
        gpu.main(["--output_dir", str(tmp_path)])


def test_qwen3_8b_shapes_are_right():
    config = gpu.Qwen3Config(**gpu.QWEN3_8B)
    with torch.device("meta"):
        target = gpu.AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in target.parameters()) == 8_190_735_360  # as published: 8.2 B


# Long contexts ------------------------------------------------------------------------------------------------------


def test_no_round_copies_the_context():
    context = 1024
    target, drafter = context_module.build(context)
    rounds = context_module.allocated(target, drafter, context)
    keys_of_a_layer = context * 4 * 32 * 4
    assert len(rounds) == context_module.ROUNDS - 1
    for part in ("target", "loop", "draft"):
        assert max(size for found in rounds for size, _ in found[part]) < keys_of_a_layer / 4
    # What does go over the whole context are the library's ids and masks, 8 bytes a column for each step it takes.
    total = max(sum(size for size, _ in found["loop"]) for found in rounds)
    assert total < 8 * 24 * context


def test_a_copy_would_be_seen():
    context = 512
    states = torch.zeros(context, 4, 32)
    log = context_module.Allocations()
    with log:
        log.enter("draft")
        copied = states + 0
        view = states[1:].transpose(0, 1)
    assert log.rounds[-1]["draft"] == [(copied.nbytes, "aten.add.Tensor")] and view.shape[1] == context - 1


def test_the_context_script(tmp_path, capsys):
    context_module.main(["--output_dir", str(tmp_path), "--context", "64", "32", "--repeats", "1"])
    report = json.loads((tmp_path / "context.json").read_text())
    assert [entry["context"] for entry in report["contexts"]] == [32, 64]
    for entry in report["contexts"]:
        assert entry["rounds"] == context_module.ROUNDS - 1
        assert all(0 < low <= middle <= high for low, middle, high in entry["seconds"].values())
    assert (tmp_path / "context.png").read_bytes().startswith(b"\x89PNG")
    assert "everything else" in capsys.readouterr().out
