"""Training: what is supervised, which blocks are seen, the curriculum, and tau that means what decoding does."""

import math

import pytest
import torch
from domino_spec.target_domino import target_logits
from domino_spec.training import objective as objective_module
from domino_spec.training.data import (
    block_attention_mask,
    first_anchors,
    frequent_ids,
    sample_anchors,
)
from domino_spec.training.losses import DraftLoss
from domino_spec.training.objective import DominoObjective, target_states
from domino_spec.training.start import FeatureScale, initialise_from_target
from domino_spec.training.tau import answer_spans, simulated_rounds, simulated_tau
from tiny import BLOCK, MASK_ID, VOCAB, batch_of, drawn, make_drafter, make_target, one_row, prompt_ids

# Anchors and blocks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("supervised", "anchors"),
    [
        ([0, 0, 1, 1, 1], [2, 3]),
        ([1, 1, 1], [1]),
        ([0, 0, 0], []),
        ([0, 0, 1], []),
        ([0, 1, 0, 1, 1, 0, 1], [3]),
    ],
)
def test_first_anchors(supervised, anchors):
    assert first_anchors(torch.tensor([supervised]))[0].nonzero()[:, 0].tolist() == anchors


def test_sample_anchors():
    valid = torch.zeros(3, 20, dtype=torch.bool)
    valid[0, 3:15] = True
    valid[1, 7] = True
    anchors, kept = sample_anchors(valid, 5, torch.Generator().manual_seed(0))
    assert anchors.shape == kept.shape == (3, 5)
    assert kept.sum(-1).tolist() == [5, 1, 0]
    assert anchors[1][kept[1]].tolist() == [7]
    chosen = anchors[0].tolist()
    assert chosen == sorted(set(chosen)) and all(3 <= anchor < 15 for anchor in chosen)
    again, _ = sample_anchors(valid, 5, torch.Generator().manual_seed(0))
    other, _ = sample_anchors(valid, 5, torch.Generator().manual_seed(1))
    assert torch.equal(again, anchors) and not torch.equal(other, anchors)
    anchors, kept = sample_anchors(valid, 99)
    assert anchors[0][kept[0]].tolist() == list(range(3, 15))
    counts = torch.zeros(20)
    generator = torch.Generator().manual_seed(0)
    for _ in range(600):
        counts[sample_anchors(valid[:1], 3, generator)[0][0]] += 1
    assert counts[3:15].min() > 100 and counts.sum() == 1800


def test_block_mask_equals_the_naive_one():
    anchors, length, size = torch.tensor([[2, 5], [1, 4]]), 7, 3
    real = torch.ones(2, length, dtype=torch.bool)
    real[1, 3:] = False
    mask = block_attention_mask(anchors, size, real)
    assert mask.shape == (2, 1, 2 * size, length + 2 * size)
    for row in range(2):
        for query in range(2 * size):
            block = query // size
            for key in range(length + 2 * size):
                if key < length:
                    expected = key < anchors[row, block] and bool(real[row, key])
                else:
                    expected = (key - length) // size == block
                assert bool(mask[row, 0, query, key]) == bool(expected), (row, query, key)


# Loss ---------------------------------------------------------------------------------------------------------------


def naive_weight(rule, k: int, chances: list[float], fixed: bool = False) -> float:
    """Weight of draft k, counted from 1, of a block whose labels have these probabilities."""
    if rule.position_weights == "exponential":
        return math.exp(-(k - 1) / rule.gamma)
    if fixed:
        return 1.0
    smooth = [(1 - rule.dpace_alpha) * chance + rule.dpace_alpha for chance in chances]
    return sum(math.prod(smooth[:m]) for m in range(k, len(smooth) + 1))


@torch.no_grad()
def naive_loss(objective, batch, anchors, lam):
    """Block by block and draft by draft, each block alone and through its own target forward."""
    drafter, target, config = objective.drafter, objective.target, objective.config
    totals, weight_sum = {"base": 0.0, "final": 0.0}, 0.0
    for row, supervised, mask, places in zip(
        batch["input_ids"], batch["supervised"], batch["attention_mask"], anchors, strict=True
    ):
        ids = row[: int(mask.sum())][None]
        states = target_states(target, config.target_layer_ids, ids, torch.ones_like(ids))
        for anchor in places.tolist():
            block = torch.full((1, BLOCK), MASK_ID)
            block[0, 0] = ids[0, anchor]
            table = target.get_input_embeddings()
            slots = torch.arange(BLOCK)[None]
            z = drafter(table(block), states.tapped[:, :anchor], anchor + slots, torch.arange(anchor)[None])
            z = z[:, config.first_draft_slot :]
            base = target_logits(target, z)
            prefix = torch.nn.functional.pad(ids[:, anchor:], (0, BLOCK))[:, : config.num_drafts]
            final = drafter.correct_block(base, z, table(prefix))
            last = 0
            for k in range(1, config.num_drafts + 1):
                if anchor + k >= ids.shape[1] or not supervised[anchor + k]:
                    break
                last = k
            rule = objective.loss
            weight_sum += sum(naive_weight(rule, k, [1.0] * last, fixed=True) for k in range(1, last + 1))
            for name, logits in (("base", base), ("final", final)):
                laws = logits[0].softmax(-1)
                labels = ids[0, anchor + 1 : anchor + 1 + last]
                chances = laws[range(last), labels].tolist()
                for k in range(1, last + 1):
                    p, q = target.lm_head(states.final[0, anchor + k - 1]).softmax(-1), laws[k - 1]
                    loss = rule.cross_entropy * -q[labels[k - 1]].log()
                    loss += rule.forward_kl * (p * (p / q).log()).sum()
                    loss += rule.total_variation * (p - torch.minimum(p, q)).sum()
                    totals[name] += naive_weight(rule, k, chances) * float(loss)
    return (lam * totals["base"] + (1 - lam) * totals["final"]) / weight_sum


@pytest.mark.parametrize("shift_label", [True, False])
@pytest.mark.parametrize("encoder", ["gru", "attention"])
@pytest.mark.parametrize(
    ("lam", "loss", "prefix"),
    [
        (1.0, DraftLoss(gamma=3.0), 1),
        (0.3, DraftLoss(gamma=3.0), 0),
        (0.0, DraftLoss(gamma=9.0), 2),
        (0.4, DraftLoss(cross_entropy=0.4, forward_kl=0.6), 1),
        (0.4, DraftLoss(cross_entropy=0.1, total_variation=0.9, gamma=2.0), 1),
        (0.5, DraftLoss(cross_entropy=0.0, forward_kl=1.0, position_weights="dpace", dpace_alpha=0.3), 1),
        (0.5, DraftLoss(position_weights="dpace", dpace_alpha=0.0), 1),
    ],
)
def test_loss_equals_the_naive_one(encoder, shift_label, lam, loss, prefix):
    target = make_target("qwen3")
    drafter = make_drafter(target, causal_encoder=encoder, shift_label=shift_label, pure_draft_prefix_len=prefix)
    objective = DominoObjective(drafter, target, loss=loss, logits_chunk_size=BLOCK)
    rows = [{"input_ids": prompt_ids(18, seed=1)[0].tolist(), "supervised": [0] * 4 + [1] * 14}]
    rows.append({"input_ids": prompt_ids(12, seed=2)[0].tolist(), "supervised": [0] * 3 + [1] * 5 + [0] * 2 + [1] * 2})
    batch, anchors = batch_of(*rows), torch.tensor([[4, 9, 15], [3, 5, 10]])
    result = objective(**batch, lam=lam, anchors=anchors)
    assert result["loss"].item() == pytest.approx(naive_loss(objective, batch, anchors, lam), rel=1e-4)


def test_vocabulary_estimate_with_all_ids_is_the_full_loss():
    target = make_target()
    drafter = make_drafter(target)
    batch = batch_of(one_row(target), one_row(target, 25))
    anchors = torch.tensor([[8, 14, 20, 30], [7, 10, 12, 20]])
    full = DominoObjective(drafter, target)(**batch, lam=0.5, anchors=anchors)
    full["loss"].backward()
    gradients = {name: p.grad.clone() for name, p in drafter.named_parameters()}
    for ids, negatives in ((torch.arange(VOCAB), 8), (torch.arange(0, VOCAB, 3), VOCAB)):
        drafter.zero_grad()
        objective = DominoObjective(drafter, target, frequent_ids=ids, num_negatives=negatives)
        if len(ids) == VOCAB:
            estimate = objective(**batch, lam=0.5, anchors=anchors)
        else:
            # Drawn with repetition, some ids are missing and some counted twice; take each once instead.
            objective.softmax_ids = lambda labels, seed: (torch.randperm(VOCAB), torch.zeros(VOCAB))
            estimate = objective(**batch, lam=0.5, anchors=anchors)
        assert estimate["loss"].item() == pytest.approx(full["loss"].item(), rel=1e-5)
        estimate["loss"].backward()
        for name, parameter in drafter.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-5)
        assert estimate["final_hits"].tolist() == full["final_hits"].tolist()


def test_vocabulary_estimate_is_close_on_average():
    target = make_target()
    objective = DominoObjective(make_drafter(target), target)
    batch, anchors = batch_of(one_row(target)), torch.tensor([[8, 14, 20, 30]])
    full = objective(**batch, lam=0.5, anchors=anchors)["loss"].item()
    objective.frequent_ids, objective.num_negatives = torch.arange(10), 16
    estimates = [objective(**batch, lam=0.5, anchors=anchors, seed=seed)["loss"].item() for seed in range(40)]
    assert estimates[3] == objective(**batch, lam=0.5, anchors=anchors, seed=3)["loss"].item()
    assert sum(estimates) / 40 == pytest.approx(full, rel=0.1)
    assert all(abs(estimate - full) > 1e-6 for estimate in estimates)


def test_matrices_come_in_few_sizes(monkeypatch):
    """Whatever the number of labels: a CPU's matrix library compiles a kernel for every new size."""
    target = make_target(vocab_size=1500)
    objective = DominoObjective(
        make_drafter(target), target, frequent_ids=torch.arange(300), num_negatives=256, logits_chunk_size=4 * BLOCK
    )
    sizes, called, correct = set(), objective_module.target_logits, objective.corrections

    def watched(target, states, ids, rows):
        sizes.add((len(states), len(ids)))
        return called(target, states, ids, rows)

    def corrections(states, encoded, ids, rows=None):
        sizes.add((len(states), len(ids)))
        assert len(encoded) == len(states)
        return correct(states, encoded, ids, rows)

    monkeypatch.setattr(objective_module, "target_logits", watched)
    objective.corrections = corrections
    for seed in range(12):
        batch = batch_of(one_row(target, length=20 + seed))
        anchors = torch.tensor([[8, 11, 17 + seed]])
        objective(**batch, lam=0.5, anchors=anchors, seed=seed)
    assert {rows % BLOCK for rows, _ in sizes} == {0} and {ids % 256 for _, ids in sizes} == {0}


@pytest.mark.parametrize("lam", [1.0, 0.5, 0.0])
def test_batches_without_an_anchor_train_nothing_and_do_not_crash(lam):
    """F13: rows shorter than a block, without answer, or with one supervised token; then one with one anchor."""
    target = make_target()
    drafter = make_drafter(target)
    objective = DominoObjective(drafter, target)
    barren = [
        {"input_ids": [1, 2, 3], "supervised": [0, 0, 0]},
        {"input_ids": [1, 2, 3, 4], "supervised": [0, 0, 0, 1]},
    ]
    result = objective(**drawn(batch_of(*barren)), lam=lam)
    assert result["loss"].item() == 0 and result["counts"].sum() == 0
    result["loss"].backward()
    assert all(p.grad is None or not p.grad.any() for p in drafter.parameters())
    single = {"input_ids": [1, 2, 3, 4], "supervised": [0, 0, 1, 1]}
    result = objective(**drawn(batch_of(*barren, single)), lam=lam)
    assert result["loss"].item() > 0
    assert result["counts"].tolist() == [1] + [0] * (BLOCK - 1)
    result["loss"].backward()
    assert drafter.fc.weight.grad.any()


def test_only_some_parameters_get_gradients():
    """The target is never trained; with lambda 1 the head is left out, below 1 it learns."""
    target = make_target()
    drafter = make_drafter(target)
    objective = DominoObjective(drafter, target)
    assert not any("target" in name for name, _ in objective.named_parameters())
    target.requires_grad_(False)
    batch = batch_of(one_row(target))
    head = {id(p) for module in drafter.head_modules() for p in module.parameters()}
    for lam in (1.0, 0.5):
        objective.zero_grad()
        objective(**drawn(batch, 4), lam=lam)["loss"].backward()
        for name, parameter in drafter.named_parameters():
            trained = parameter.grad is not None and bool(parameter.grad.any())
            assert trained == (lam < 1 or id(parameter) not in head), name
    assert all(p.grad is None for p in target.parameters())


# Rounds -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accepted", "first", "end", "expected"),
    [
        ([0, 0, 0, 0], 3, 7, [1, 1, 1, 1]),
        ([2, 9, 9, 1], 3, 8, [3, 2]),  # 3 -> 6 -> 8
        ([5, 0, 0, 0], 3, 7, [4]),  # the block is cut by the end
        ([1, 9, 0, 9], 3, 7, [2, 1, 1]),  # 3 -> 5 -> 6 -> 7 (the last two: 0 and cut 9)
        ([3, 0, 0, 0], 3, 7, [4]),
    ],
)
def test_simulated_rounds(accepted, first, end, expected):
    anchors = list(range(first, first + len(accepted)))
    assert simulated_rounds(torch.tensor(accepted), anchors, end) == expected


def train_a_little(target, drafter, row, steps: int):
    objective = DominoObjective(drafter, target)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    batch = batch_of(row)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        loss = objective(**drawn(batch, 16, generator), lam=1 - step / steps)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return objective


@pytest.mark.parametrize(("encoder", "shift_label", "prefix"), [("gru", True, 1), ("attention", False, 0)])
def test_simulated_acceptance_equals_real_decoding(encoder, shift_label, prefix):
    """A half-trained drafter: what the objective counts at each anchor is what the loop accepts there."""
    target = make_target("qwen3")
    drafter = make_drafter(
        target,
        causal_encoder=encoder,
        shift_label=shift_label,
        pure_draft_prefix_len=prefix,
        initializer_range=0.05,
    )
    row = one_row(target, 60)
    objective = train_a_little(target, drafter, row, 60)
    lengths, anchors = objective.accepted_lengths(row)
    assert anchors == list(range(7, 59))
    assert 1 < len(set(lengths["final"].tolist()))
    for name, use_head in (("final", True), ("base", False)):
        drafter.generation_config.use_head = use_head
        target.generate(
            torch.tensor([row["input_ids"][:7]]), max_new_tokens=53, do_sample=False, assistant_model=drafter
        )
        stats = drafter.last_speculation
        place, expected = 7, []
        while place < 59:
            expected.append(min(int(lengths[name][place - 7]) + 1, 59 - place))
            place += expected[-1]
        assert stats.acceptance_lengths == [expected]
        assert simulated_rounds(lengths[name], anchors, 59) == expected
        metrics = simulated_tau(objective, [row])
        assert metrics[f"tau_{name}"] == pytest.approx(stats.mean_acceptance_length)
        rates = [metrics[f"acceptance_{name}_{i + 1}"] for i in range(objective.config.num_drafts)]
        assert rates == pytest.approx(stats.acceptance_rate_per_position)


def test_frequent_ids():
    rows = [{"input_ids": [1, 2, 2, 3, 3, 3], "supervised": [0, 1, 1, 1, 1, 1]}, {"input_ids": [1], "supervised": [0]}]
    assert frequent_ids(rows, 2).tolist() == [3, 2]


# Feature scale ------------------------------------------------------------------------------------------------------


def test_feature_scale_changes_nothing_in_function():
    target = make_target()
    drafter = make_drafter(target)
    batches = [batch_of(one_row(target, 20), one_row(target, 14)), batch_of(one_row(target, 25))]
    scale = FeatureScale.measure(drafter, target, batches)
    kept = []
    for batch in batches:
        states = target_states(target, drafter.config.target_layer_ids, batch["input_ids"], batch["attention_mask"])
        for row, mask in zip(states.tapped, batch["attention_mask"], strict=True):
            kept.append(row[1 : int(mask.sum())])
    torch.testing.assert_close(scale.scale, torch.cat(kept).square().mean(0).sqrt())
    raw = drafter.fc.weight.detach().clone()
    features = torch.cat(kept)[:5] * 3
    with torch.no_grad():
        expected = drafter.fc(features)
        scale.attach()
        assert not torch.allclose(drafter.fc.weight, raw)
        torch.testing.assert_close(drafter.fc(features), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(scale.raw(drafter.fc.weight), raw)
        scale.fold()
        torch.testing.assert_close(drafter.fc.weight, raw)
        assert not drafter.fc._forward_pre_hooks


def test_initialise_from_target():
    target = make_target("qwen3")
    drafter = make_drafter(target)
    initialise_from_target(drafter, target, [1, 3])
    for ours, i in zip(drafter.layers, (1, 3), strict=True):
        theirs = target.model.layers[i].state_dict()
        assert all(torch.equal(p, theirs[name]) for name, p in ours.named_parameters())
    with pytest.raises(ValueError, match="init_layers_from_target"):
        initialise_from_target(drafter, target, [1])
    with pytest.raises(ValueError, match="init_layers_from_target"):
        initialise_from_target(drafter, target, [1, 4])


def test_answers_of_a_chat_are_walked_one_by_one():
    assert answer_spans([0, 1, 1, 0, 0, 1, 1, 1]) == [(1, 2), (5, 7)]
    assert answer_spans([0, 0]) == []
    target = make_target("llama")
    objective = DominoObjective(make_drafter(target), target)
    ids = prompt_ids(16)[0].tolist()
    # Four answer tokens in each of two turns: three rounds of one token each, nothing for the user's turn between.
    row = {"input_ids": ids, "supervised": [0] * 2 + [1] * 4 + [0] * 6 + [1] * 4}
    nothing = torch.zeros(6, dtype=torch.long)
    objective.accepted_lengths = lambda row: ({"base": nothing, "final": nothing}, [2, 3, 4, 12, 13, 14])
    assert simulated_tau(objective, [row])["tau_base"] == 1.0
