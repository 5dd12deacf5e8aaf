"""What a training run leaves to look at: curves and the model card."""


def plot_curve(curve: list[dict], path: str) -> None:
    """Losses and lambda above, held-out tau and accuracy per draft below, over optimizer steps; written as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = [entry for entry in curve if "base_loss" in entry]
    held_out = [entry for entry in curve if "eval_tau_base" in entry]
    figure, (losses, lengths) = pyplot.subplots(2, 1, figsize=(8, 7), sharex=True)
    for name in ("base_loss", "final_loss"):
        losses.plot([e["step"] for e in steps], [e[name] for e in steps], label=name.replace("_", " "))
    weight = losses.twinx()
    weight.plot([e["step"] for e in steps], [e["lambda"] for e in steps], "k:", label="lambda")
    weight.set_ylabel("lambda (dotted)")
    losses.set_ylabel("loss")
    losses.legend()
    for name in ("base", "final"):
        points = [e["step"] for e in held_out], [e[f"eval_tau_{name}"] for e in held_out]
        lengths.plot(*points, "o-", label=f"held-out tau, {name} logits")
    lengths.set_ylabel("tau (simulated rounds)")
    lengths.set_xlabel("optimizer step")
    lengths.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
