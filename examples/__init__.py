"""A demonstration on SmolLM2, and that target without a model hub."""
