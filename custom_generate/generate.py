"""The Hub's `custom_generate` hook: a thin call to the drafter, which owns the decode loop."""


def generate(model, *args, assistant_model=None, **kwargs):
    """Same as `model.generate(..., assistant_model=assistant_model)`."""
    if assistant_model is None or not getattr(assistant_model, "is_domino_drafter", False):
        raise ValueError(
            "custom_generate needs the drafter: pass "
            "`assistant_model=AutoModel.from_pretrained(REPO, trust_remote_code=True)` beside it."
        )
    return assistant_model.generate_for(model, *args, **kwargs)
