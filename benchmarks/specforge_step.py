"""Time and peak memory of one training step beside specforge's Domino model: same weights, rows, anchors and loss.

    pip install --no-deps specforge==0.2.0        # in an environment of its own; never a dependency of this package
    python -m domino_spec.benchmarks.specforge_step # runs each in a process of its own, in turns; prints the ratios

Both get the target's states ready made; a step is forward, backward and AdamW in float32 on the CPU, with a random
vocabulary of 49152 and every slot of every block supervised. The two losses must agree before anything is timed.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
import warnings
from types import SimpleNamespace

import torch

VOCAB, HIDDEN, TAPS, LENGTH = 49152, 576, 3, 512
LAMBDA, GAMMA = 0.5, 7.0


def make_drafter(layers: int, block: int):
    """A seeded drafter for a Llama of SmolLM2's shape, with a head that corrects."""
    from domino_spec import DominoConfig, DominoForSpeculation
    from transformers import LlamaConfig

    target = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
    )
    sizes = {"num_hidden_layers": layers, "block_size": block, "mask_token_id": 3, "target_layer_ids": [1, 14, 27]}
    torch.manual_seed(0)
    drafter = DominoForSpeculation(DominoConfig.from_target(target, head_hidden_size=256, head_rank=128, **sizes))
    torch.nn.init.normal_(drafter.embed_proj[2].weight, std=0.02)
    return drafter


def make_data(anchors: int, block: int):
    """Random ids, states and frozen tables. Just so many positions are supervised that every one becomes an anchor."""
    generator = torch.Generator().manual_seed(1)
    data = SimpleNamespace(
        ids=torch.randint(100, VOCAB, (1, LENGTH), generator=generator),
        tapped=torch.randn(1, LENGTH, TAPS * HIDDEN, generator=generator),
        supervised=torch.zeros(1, LENGTH, dtype=torch.long),
    )
    start = LENGTH - anchors - 1
    data.supervised[:, start:] = 1
    data.anchors = torch.arange(start, LENGTH - 1)[None]
    torch.manual_seed(2)
    data.embedding, data.head = torch.nn.Embedding(VOCAB, HIDDEN), torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    for module in (data.embedding, data.head):
        module.requires_grad_(False)
    return data


def ours(drafter, data, options):
    """This package's step."""
    from domino_spec.training.losses import DraftLoss
    from domino_spec.training.objective import DominoObjective, TargetStates

    target = SimpleNamespace(
        get_input_embeddings=lambda: data.embedding,
        get_output_embeddings=lambda: data.head,
        lm_head=data.head,
        config=drafter.config,
    )
    objective = DominoObjective(drafter, target, loss=DraftLoss(gamma=GAMMA), logits_chunk_size=options.chunk)
    objective.states_of = lambda *_: TargetStates(data.tapped, None)
    batch = {"input_ids": data.ids, "attention_mask": torch.ones_like(data.ids), "supervised": data.supervised}
    return lambda: objective(**batch, anchors=data.anchors, lam=LAMBDA)["loss"]


def theirs(drafter, data, options):
    """specforge's step, with its own model holding the same weights."""
    warnings.simplefilter("ignore")
    from specforge.algorithms.common.dflash_family_model import OnlineDominoModel
    from specforge.modeling.draft.domino import DominoDraftModel
    from transformers import Qwen3Config

    config = Qwen3Config(**(drafter.config.to_dict() | {"model_type": "qwen3", "attn_implementation": "sdpa"}))
    model = DominoDraftModel(config)
    model.load_state_dict(drafter.state_dict())
    wrapper = OnlineDominoModel(
        model,
        data.head,
        data.embedding,
        mask_token_id=3,
        block_size=config.block_size,
        attention_backend="sdpa",
        num_anchors=data.anchors.shape[1],
        loss_decay_gamma=GAMMA,
        shift_label=True,
    )
    step = lambda: wrapper(data.ids, data.tapped, data.supervised, lambda_base=LAMBDA)[0]  # noqa: E731
    step.parameters = list(model.parameters())
    return step


def measure(options) -> None:
    """One library's turn: loss, median seconds of a step, peak resident GiB above what was there before."""
    drafter = make_drafter(options.layers, options.block_size)
    data = make_data(options.anchors, options.block_size)
    step = (ours if options.run == "domino" else theirs)(drafter, data, options)
    parameters = getattr(step, "parameters", None) or list(drafter.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-5)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds, first = [], None
    for _ in range(options.steps + 1):
        start = time.perf_counter()
        loss = step()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
        first = loss.item() if first is None else first
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    print(json.dumps({"loss": first, "seconds": statistics.median(seconds[1:]), "gib": peak}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--block_size", type=int, default=8)
    parser.add_argument("--anchors", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=256, help="our --logits_chunk_size")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--run", choices=["domino", "specforge"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        return measure(options)
    results = {"domino": [], "specforge": []}
    for _ in range(options.turns):
        for name, rows in results.items():
            command = [sys.executable, "-m", "domino_spec.benchmarks.specforge_step", *sys.argv[1:], "--run", name]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            rows.append(json.loads(output.splitlines()[-1]))
    for name, rows in results.items():
        print(name, *(f"{key} {statistics.median(row[key] for row in rows):.5g}" for key in rows[0]))
    losses = [rows[0]["loss"] for rows in results.values()]
    if abs(losses[0] - losses[1]) > 1e-4 * losses[1]:
        sys.exit(f"the losses differ ({losses}): nothing was compared.")
    for key in ("seconds", "gib"):
        ratio = statistics.median(a[key] / b[key] for a, b in zip(*results.values(), strict=True))
        print(f"domino / specforge, {key}: {ratio:.2f}")


if __name__ == "__main__":
    main()
