"""Training a drafter: data, objective, trainer, adapters and what a run leaves. No loaded drafter imports it."""
